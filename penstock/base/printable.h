// Text that may be printed as it is, whatever it was made from: names of files, values of flags, bytes of files that are quoted in a message.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace penstock {

// `text` with control bytes and whatever is not UTF-8 as \x.. of their values, so that no message can move the cursor or change the
// colours of a terminal. Newlines and tabs stay.
std::string printable(std::string_view text);

// At most `most` bytes of it, cut between characters: the beginning, "...", the end and how long it was.
std::string shortened(std::string_view text, std::size_t most);

}  // namespace penstock
