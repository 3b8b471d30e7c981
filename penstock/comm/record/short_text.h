// Fixed-size text inside a record: copied without allocation, truncated if it is too long.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string_view>

namespace penstock::comm {

// Holds at most Bytes - 1 characters and ends at the first NUL. The unused tail is zero, so equal texts have
// equal bytes.
template <std::size_t Bytes>
class ShortText {
 public:
  constexpr ShortText() = default;
  constexpr ShortText(std::string_view text) {  // implicit, so that records are filled from plain strings
    text = text.substr(0, std::min({text.find('\0'), text.size(), Bytes - 1}));
    std::copy(text.begin(), text.end(), bytes_.begin());
  }
  constexpr ShortText(const char* text) : ShortText(std::string_view(text)) {}

  constexpr std::string_view view() const {
    return {bytes_.data(), std::char_traits<char>::length(bytes_.data())};
  }
  constexpr bool operator==(const ShortText&) const = default;

 private:
  std::array<char, Bytes> bytes_{};
};

}  // namespace penstock::comm
