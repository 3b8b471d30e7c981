// Messages of exceptions of any type.
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

TEST(ExceptionText, DescribesTheInnerOfTwoNestedExceptions) {
  try {
    throw std::runtime_error("outer");
  } catch (...) {
    EXPECT_EQ(text_of(std::runtime_error("inner")), "inner");
    EXPECT_EQ(current_exception_text(), "outer");
  }
}

TEST(ExceptionText, BacktracesAndTagsOfLibrariesAreLeftOut) {
  EXPECT_EQ(
      without_backtrace(
          "bad size\nException raised from f at a.cpp:1 (most recent call first):\nframe #0: c10::Error"),
      "bad size");
  EXPECT_EQ(without_backtrace("[enforce fail at alloc_cpu.cpp:75] no memory\nframe #0: <unknown function>"),
            "[enforce fail at alloc_cpu.cpp:75] no memory");
  EXPECT_EQ(without_backtrace("two\nlines"), "two\nlines");
  EXPECT_EQ(text_of(std::runtime_error("hot\n\nException raised from f at a.cpp:1")), "hot");
  EXPECT_EQ(without_json_tag("[json.exception.parse_error.101] parse error at line 1"),
            "parse error at line 1");
  EXPECT_EQ(without_json_tag("[1, 2] is no object"), "[1, 2] is no object");
}

}  // namespace exception_text_test
}  // namespace penstock
