// What an exception says, whatever its type: for errors that quote the exceptions of users' code.
#pragma once

#include <exception>
#include <string>

namespace penstock {

// Of the exception that is being handled: its what(), or "an exception of type int" for one that is no std::exception. To be called
// in a catch block.
std::string current_exception_text();

}  // namespace penstock
