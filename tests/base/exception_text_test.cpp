// What exceptions of any type say.
#include <gtest/gtest.h>

#include <stdexcept>

#include "penstock/base/exception_text.h"

namespace penstock {
namespace exception_text_test {

struct Unusual {};

template <class Thrown>
std::string text_of(const Thrown& thrown) {
  try {
    throw thrown;
  } catch (...) {
    return current_exception_text();
  }
}

TEST(ExceptionText, OfAnyType) {
  EXPECT_EQ(text_of(std::runtime_error("too hot")), "too hot");
  EXPECT_EQ(text_of(42), "an exception of type int");
  EXPECT_EQ(text_of(Unusual()), "an exception of type penstock::exception_text_test::Unusual");
  EXPECT_EQ(current_exception_text(), "no exception");
}

TEST(ExceptionText, TheInnerOneWhereOneIsHandledInsideAnother) {
  try {
    throw std::runtime_error("outer");
  } catch (...) {
    EXPECT_EQ(text_of(std::runtime_error("inner")), "inner");
    EXPECT_EQ(current_exception_text(), "outer");
  }
}

}  // namespace exception_text_test
}  // namespace penstock
