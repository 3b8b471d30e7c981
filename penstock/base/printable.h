// Makes untrusted text safe to print: file names, flag values, bytes of files that a message quotes.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace penstock {

// `text` with control bytes and invalid UTF-8 written as \x.., so that no message can move the cursor or
// change the colours of a terminal. Newlines and tabs are kept.
std::string printable(std::string_view text);

// The same in at most `most` bytes, cut between characters: the beginning, "...", the end and the original
// length.
std::string shortened(std::string_view text, std::size_t most);

}  // namespace penstock
