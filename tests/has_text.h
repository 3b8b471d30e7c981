// Whether a text contains a part; on failure the whole text is shown.
#pragma once

#include <gtest/gtest.h>

#include <string>

namespace penstock::test {

inline ::testing::AssertionResult has_text(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess() << "\"" << part << "\" is in: " << text;
  return ::testing::AssertionFailure() << "\"" << part << "\" is not in: " << text;
}

}  // namespace penstock::test
