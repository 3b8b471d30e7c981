// What the report page brings along: its style sheet and its script. Neither refers to anything outside.
#pragma once

#include <string_view>

namespace penstock::train {

extern const std::string_view kReportStyle;
// Values under the pointer, and the cells of a timeline that belong to one microbatch. Without it the page is whole, only less lively.
extern const std::string_view kReportScript;

}  // namespace penstock::train
