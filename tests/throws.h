// The message of the exception that a call throws, for tests of error messages.
#pragma once

#include <gtest/gtest.h>

#include <string>

namespace penstock::test {

template <class Error, class Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "an exception of another type: " << error.what();
    return {};
  }
  ADD_FAILURE() << "no exception";
  return {};
}

}  // namespace penstock::test
