#include <gtest/gtest.h>

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "penstock/base/describe.h"
#include "penstock/base/env.h"
#include "penstock/base/files.h"
#include "penstock/base/text.h"
#include "penstock/base/warnings.h"
#include "penstock/errors.h"
#include "tests/throws.h"

namespace penstock {
namespace base_test {

using test::message_of;

TEST(Errors, KindsAreDistinctAndKeepTheStandardBase) {
  EXPECT_THROW(throw ConfigError("x"), ValueError);
  EXPECT_THROW(throw ValueError("x"), Error);
  EXPECT_THROW(throw PipeliningMetadataError("x"), MismatchError);
  EXPECT_THROW(throw StateError("x"), Error);
  EXPECT_THROW(throw InvariantError("x"), Error);
  EXPECT_FALSE((std::is_base_of_v<ValueError, TypeError>));
  EXPECT_FALSE((std::is_base_of_v<PipeliningMetadataError, CommError>));
}

TEST(Errors, DescribeNamesWhatActualExpectedRemedy) {
  EXPECT_EQ(describe("ranks", "5", "4", "start 4"), "ranks: got 5, expected 4; start 4");
  EXPECT_EQ(describe("ranks", "", "4", ""), "ranks: expected 4");
  EXPECT_EQ(describe("ranks", "5", "", ""), "ranks: got 5");
}

TEST(Errors, CommErrorCarriesItsContext) {
  CommContext context;
  context.rank = 2;
  context.peer = 3;
  context.operation = "send";
  context.group = "pp";
  context.label = "2F0";
  context.elapsed_s = 1.5;
  const TimeoutError error("no answer", context);
  EXPECT_STREQ(error.what(),
               "no answer [rank 2, peer 3, operation send, group pp, label \"2F0\", after 1.500 s]");
  EXPECT_EQ(error.context().peer, 3);
}

TEST(Errors, InvariantStaysOnInReleaseBuilds) {
  const auto text = message_of<InvariantError>([] { PENSTOCK_INVARIANT(1 + 1 == 3, "sums hold"); });
  EXPECT_NE(text.find("sums hold"), std::string::npos);
  EXPECT_NE(text.find("1 + 1 == 3"), std::string::npos);
}

TEST(Text, NearestNameFindsTyposOnly) {
  const std::vector<std::string> names = {"ranks", "microbatches", "schedule"};
  EXPECT_EQ(nearest_name("rnaks", names), "ranks");
  EXPECT_EQ(nearest_name("MICROBATCH", names), "microbatches");
  EXPECT_EQ(nearest_name("zebra", names), "");
}

TEST(Text, BytesAndLists) {
  EXPECT_EQ(format_bytes(512), "512 B");
  EXPECT_EQ(format_bytes(65536), "64.0 KiB");
  EXPECT_EQ(format_bytes(8ull << 30), "8.0 GiB");
  EXPECT_EQ(format_list({0, 1, 2}), "0, 1, 2");
  EXPECT_EQ(format_list({0, 1, 2}, 2), "0, 1, ... (3 in all)");
}

TEST(Env, NumbersAndChoicesAreChecked) {
  setenv("PENSTOCK_TEST_VALUE", "12", 1);
  EXPECT_EQ(env_int("PENSTOCK_TEST_VALUE", 0, 20), 12);
  for (const char* bad : {"12x", "21", "-1", " 3"}) {
    setenv("PENSTOCK_TEST_VALUE", bad, 1);
    const auto text = message_of<ConfigError>([] { env_int("PENSTOCK_TEST_VALUE", 0, 20); });
    EXPECT_NE(text.find("PENSTOCK_TEST_VALUE"), std::string::npos);
    EXPECT_NE(text.find(bad), std::string::npos);
    EXPECT_NE(text.find("0 to 20"), std::string::npos);
  }
  setenv("PENSTOCK_TEST_VALUE", "", 1);
  EXPECT_EQ(env_int("PENSTOCK_TEST_VALUE", 0, 20), std::nullopt);
  setenv("PENSTOCK_TEST_VALUE", "DETAIL", 1);
  EXPECT_EQ(env_choice("PENSTOCK_TEST_VALUE", {"off", "detail"}, "off"), "detail");
  setenv("PENSTOCK_TEST_VALUE", "loud", 1);
  EXPECT_THROW(env_choice("PENSTOCK_TEST_VALUE", {"off", "detail"}, "off"), ConfigError);
}

TEST(Env, DebugLevelHonoursTorchsVariable) {
  unsetenv("PENSTOCK_DEBUG");
  setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL", 1);
  EXPECT_EQ(debug_level(), DebugLevel::Detail);
  setenv("PENSTOCK_DEBUG", "info", 1);
  EXPECT_EQ(debug_level(), DebugLevel::Info);
  unsetenv("PENSTOCK_DEBUG");
  unsetenv("TORCH_DISTRIBUTED_DEBUG");
  EXPECT_EQ(debug_level(), DebugLevel::Off);
}

TEST(Warnings, AreCapturedAndWarnOnceWarnsOnce) {
  WarningCapture outer;
  warn("comm", "first");
  {
    WarningCapture inner;
    warn_once("comm", "again");
    warn_once("comm", "again");
    ASSERT_EQ(inner.warnings().size(), 1u);
    EXPECT_EQ(inner.warnings()[0].message, "again");
  }
  ASSERT_EQ(outer.warnings().size(), 1u);
  EXPECT_EQ(outer.warnings()[0].category, "comm");
}

TEST(Files, ATreeIsRemovedAndLinksAreNotFollowed) {
  namespace fs = std::filesystem;
  const fs::path top = fs::temp_directory_path() / ("penstock-base-" + std::to_string(::getpid())),
                 kept = top.string() + "-kept";
  fs::create_directories(top / "a" / "b");
  fs::create_directories(kept);
  std::ofstream(kept / "file") << "stays";
  std::ofstream(top / "a" / "file") << "goes";
  fs::create_directory_symlink(kept, top / "a" / "link");
  remove_tree(top);
  EXPECT_FALSE(fs::exists(top));
  EXPECT_TRUE(fs::exists(kept / "file"));
  remove_tree(kept / "file");
  EXPECT_FALSE(fs::exists(kept / "file"));
  remove_tree(top);  // a missing path is not an error
  remove_tree(kept);
  std::error_code error;
  remove_tree("/proc/self/status", error);
  EXPECT_TRUE(error);
  EXPECT_THROW(remove_tree("/proc/self/status"), fs::filesystem_error);
}

}  // namespace base_test
}  // namespace penstock
