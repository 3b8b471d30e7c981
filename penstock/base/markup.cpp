#include "penstock/base/markup.h"

namespace penstock {

std::string escape_xml(std::string_view text) {
  std::string escaped;
  for (const char letter : text) {
    switch (letter) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\n':
        escaped += "&#10;";
        break;
      default:
        // XML cannot represent other control characters.
        if (static_cast<unsigned char>(letter) < 0x20 && letter != '\t' && letter != '\r')
          escaped += "\xEF\xBF\xBD";
        else
          escaped += letter;
    }
  }
  return escaped;
}

}  // namespace penstock
