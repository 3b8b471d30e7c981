// Escapes text for SVG and HTML.
#pragma once

#include <string>
#include <string_view>

namespace penstock {

// Escapes text for element content and double-quoted attributes of XML and HTML. Control characters that XML
// cannot represent become U+FFFD.
std::string escape_xml(std::string_view text);

}  // namespace penstock
