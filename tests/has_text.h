// Asserts that a text contains a substring; a failure shows the whole text.
#pragma once

#include <gtest/gtest.h>

#include <string>

namespace penstock::test {

inline ::testing::AssertionResult has_text(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos)
    return ::testing::AssertionSuccess() << "\"" << part << "\" is in: " << text;
  return ::testing::AssertionFailure() << "\"" << part << "\" is not in: " << text;
}

}  // namespace penstock::test
