// The message of what a call throws, so that a test can look at its words.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <string>

namespace penstock {

template <class Error, class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another type was thrown: " << error.what();
    return {};
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

}  // namespace penstock
