// Parsing of numbers, and quoting of foreign text in messages.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "penstock/base/describe.h"
#include "penstock/base/number.h"
#include "penstock/base/quote.h"
#include "penstock/errors.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock {
namespace number_test {

using test::has_text;
using test::message_of;

constexpr const char* kNoNumbers[] = {"",     " ",        "nan",   "NaN",    "-nan",  "nan(1)", "inf", "-inf",
                                      "INF",  "infinity", "1e999", "-1e999", "3x",    "3 ",     " 3",  "+3",
                                      "0x10", "1,5",      "1_000", "--3",    "three", "."};

TEST(Number, ReadsTheWholeTextOrNothing) {
  EXPECT_EQ(parse_number("0.25"), 0.25);
  EXPECT_EQ(parse_number("-3"), -3.0);
  EXPECT_EQ(parse_number("1e-5"), 1e-5);
  EXPECT_EQ(parse_integer("-12"), -12);
  EXPECT_EQ(parse_integer("9223372036854775807"), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(parse_unsigned("18446744073709551615"), std::numeric_limits<std::uint64_t>::max());
  for (const char* text : kNoNumbers) {
    EXPECT_EQ(parse_number(text), std::nullopt) << text;
    EXPECT_EQ(parse_integer(text), std::nullopt) << text;
    EXPECT_EQ(parse_unsigned(text), std::nullopt) << text;
    EXPECT_EQ(parse_scaled(text), std::nullopt) << text;
    EXPECT_EQ(parse_bytes(text), std::nullopt) << text;
  }
  EXPECT_EQ(parse_number("1e"), std::nullopt);
  for (const char* text : {"3.0", "9223372036854775808", "1e3"})
    EXPECT_EQ(parse_integer(text), std::nullopt) << text;
  EXPECT_EQ(parse_unsigned("-1"), std::nullopt);
}

TEST(Number, BytesHaveSuffixes) {
  EXPECT_EQ(parse_bytes("0"), 0);
  EXPECT_EQ(parse_bytes("512"), 512);
  EXPECT_EQ(parse_bytes("512B"), 512);
  EXPECT_EQ(parse_bytes("64K"), 65536);
  EXPECT_EQ(parse_bytes("64kb"), 65536);
  EXPECT_EQ(parse_bytes("64KiB"), 65536);
  EXPECT_EQ(parse_bytes("1.5G"), std::int64_t{3} << 29);
  EXPECT_EQ(parse_bytes("9007199254740993"), 9007199254740993) << "a double would round it";
  EXPECT_EQ(parse_bytes("7E"), std::int64_t{7} << 60);
  for (const char* bad : {"-1", "-1K", "1.5", "8E", "12Q", "K", "B", "iB", "512iB", "1KK", "1 K"})
    EXPECT_EQ(parse_bytes(bad), std::nullopt) << bad;
  EXPECT_EQ(parse_scaled("0.5"), 0.5);
  EXPECT_EQ(parse_scaled("2M"), 2097152.0);
}

TEST(Number, ErrorsStateTheRange) {
  EXPECT_EQ(read_number("--x", "0.5", {.low = 0, .high = 1}), 0.5);
  EXPECT_EQ(message_of<ConfigError>([] { read_number("--x", "nan", {.low = 0, .high = 1}); }),
            "--x: got \"nan\", expected a number from 0 to 1");
  EXPECT_EQ(
      message_of<ConfigError>([] { read_number("--x", "0", {.low = 0, .high = 1000, .above_low = true}); }),
      "--x: got \"0\", expected a number above 0 up to 1000");
  EXPECT_EQ(message_of<ConfigError>([] { read_number("--x", "-1", {}); }),
            "--x: got \"-1\", expected a number of at least 0");
  EXPECT_EQ(message_of<ConfigError>([] { read_integer("--n", "3.0", 1, 10, "give it"); }),
            "--n: got \"3.0\", expected a whole number from 1 to 10; give it");
  EXPECT_EQ(read_integer("--n", "10", 1, 10), 10);
  EXPECT_THROW(read_integer("--n", "11", 1, 10), ConfigError);
  EXPECT_TRUE(has_text(message_of<ConfigError>([] { read_bytes("--b", "-1"); }),
                       "--b: got \"-1\", expected bytes, such as 512"));
  EXPECT_THROW(read_bytes("--b", "0", 1), ConfigError);
  EXPECT_FALSE(NumberRange{}.contains(std::numeric_limits<double>::quiet_NaN()));
  EXPECT_FALSE(NumberRange{}.contains(std::numeric_limits<double>::infinity()));
}

TEST(Quote, BinaryTextIsEscapedAndCut) {
  EXPECT_EQ(quote("plain"), "\"plain\"");
  EXPECT_EQ(quote("a\x1b[31m\x01\x7f"), "\"a\\x1b[31m\\x01\\x7f\"");
  EXPECT_EQ(quote("l\n\t"), "\"l\\n\\t\"");
  EXPECT_EQ(quote("Gr\xc3\xb6\xc3\x9f"
                  "e"),
            "\"Gr\xc3\xb6\xc3\x9f"
            "e\"")
      << "UTF-8 is readable";
  EXPECT_EQ(quote("\xff\xc3"), "\"\\xff\\xc3\"");
  EXPECT_EQ(quote("\xc2\x9b"
                  "31m"),
            "\"\\xc2\\x9b31m\"")
      << "a C1 control, which terminals obey";
  const std::string cut = quote(std::string(1000000, 'x'));
  EXPECT_LT(cut.size(), 100u);
  EXPECT_TRUE(has_text(cut, "...\" (1000000 bytes)"));
  EXPECT_EQ(printable(std::string("a\n\tb\0c", 6)), "a\n\tb\\x00c");
  EXPECT_EQ(describe("file \x1b]0;title\x07", "\x02", "text"),
            "file \\x1b]0;title\\x07: got \\x02, expected text");
}

TEST(Quote, CountsAreSingularAndPlural) {
  EXPECT_EQ(count_of(1, "file"), "1 file");
  EXPECT_EQ(count_of(0, "file"), "0 files");
  EXPECT_EQ(count_of(std::size_t{2}, "microbatch", "microbatches"), "2 microbatches");
}

}  // namespace number_test
}  // namespace penstock
