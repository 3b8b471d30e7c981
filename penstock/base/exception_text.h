// What an exception says, whatever its type: for errors that quote the exceptions of users' code.
#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace penstock {

// Of the exception that is being handled: its what() without a backtrace, or "an exception of type int" for one that is no std::exception.
// To be called in a catch block.
std::string current_exception_text();

// `text` up to the backtrace that LibTorch appends to the messages of its own exceptions: addresses that tell a user nothing.
std::string without_backtrace(std::string_view text);

// The message of an exception of nlohmann::json without its tag "[json.exception.parse_error.101] ".
std::string without_tag(std::string_view text);

}  // namespace penstock
