// The style sheet and the script embedded in the report page. Neither has external references.
#pragma once

#include <string_view>

namespace penstock::train {

extern const std::string_view kReportStyle;
// Shows values under the pointer and highlights the timeline cells of one microbatch. The page is complete
// without it.
extern const std::string_view kReportScript;

}  // namespace penstock::train
