// Text inside of SVG and HTML, for everything that draws.
#pragma once

#include <string>
#include <string_view>

namespace penstock {

// Text for element content and double-quoted attributes of XML and HTML. Control characters that XML cannot hold become U+FFFD.
std::string escape_xml(std::string_view text);

}  // namespace penstock
