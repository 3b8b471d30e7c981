// The message of an exception of any type, for errors that quote exceptions thrown by user code.
#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace penstock {

// Describes the exception being handled: its what() without a backtrace, or "an exception of type int" if it
// is not a std::exception. Call it in a catch block.
std::string current_exception_text();

// `text` without the backtrace that LibTorch appends to the messages of its exceptions; raw addresses do not
// help a user.
std::string without_backtrace(std::string_view text);

// The first line of a message: c10 appends where an exception was thrown.
std::string first_line(std::string_view text);

// The message of a nlohmann::json exception without its tag "[json.exception.parse_error.101] ".
std::string without_json_tag(std::string_view text);

}  // namespace penstock
