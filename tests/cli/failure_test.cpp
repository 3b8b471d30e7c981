// How a command ends that throws.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "penstock/base/describe.h"
#include "penstock/cli/common/failure.h"
#include "penstock/errors.h"
#include "penstock/stage.h"
#include "tests/has_text.h"

namespace penstock::test {
namespace failure_test {

struct Told {
  int exit_code = 0;
  std::string text;
};

template <class Thrower>
Told told(const Thrower& thrower) {
  ::testing::internal::CaptureStderr();
  Told end;
  try {
    thrower();
  } catch (...) {
    end.exit_code = cli::report_failure();
  }
  end.text = ::testing::internal::GetCapturedStderr();
  return end;
}

TEST(Failure, OurOwnErrorsExplainThemselves) {
  const Told usage = told([] { throw ConfigError("model.width: got 3, expected an even number"); });
  EXPECT_EQ(usage.exit_code, cli::kUsage);
  EXPECT_EQ(usage.text, "penstock: model.width: got 3, expected an even number\n");
  const Told state = told([] { throw StateError("closed"); });
  EXPECT_EQ(state.exit_code, cli::kFailed);
  EXPECT_EQ(state.text, "penstock: closed\n");
}

TEST(Failure, OtherExceptionsAreDefects) {
  for (const Told& end : {told([] { throw std::out_of_range("vector::_M_range_check"); }),
                          told([] { TORCH_CHECK(false, "no such kernel"); }), told([] { throw 42; }),
                          told([] { throw std::filesystem::filesystem_error("status", std::error_code()); }),
                          told([] { PENSTOCK_INVARIANT(1 == 2, "numbers"); })}) {
    EXPECT_EQ(end.exit_code, cli::kDefect);
    EXPECT_TRUE(end.text.starts_with("penstock: internal error: ")) << end.text;
    EXPECT_TRUE(has_text(end.text, "This is a defect of Penstock. Please report it"));
    EXPECT_EQ(end.text.find("frame #"), std::string::npos) << end.text;
  }
}

TEST(Failure, RunningOutOfMemoryIsNotADefect) {
  const Told plain = told([] { throw std::bad_alloc(); });
  EXPECT_EQ(plain.exit_code, cli::kFailed);
  EXPECT_TRUE(has_text(plain.text, "penstock: not enough memory"));
  const auto allocate = [] {
    TORCH_CHECK(false,
                "[enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: "
                "you tried to allocate 281474976710656 bytes. Error code 12");
  };
  const Told cpu = told(allocate);
  EXPECT_EQ(cpu.exit_code, cli::kFailed);
  EXPECT_TRUE(has_text(cpu.text, "256.0 TiB on the CPU could not be allocated"));
  const Told nested = told([&] {
    try {
      allocate();
    } catch (...) {
      std::throw_with_nested(StageForwardError("stage 0 failed"));
    }
  });
  EXPECT_EQ(nested.exit_code, cli::kFailed);
  EXPECT_TRUE(has_text(nested.text, "256.0 TiB on the CPU could not be allocated"));
}

TEST(Failure, MessagesAreEscapedAndLimited) {
  EXPECT_EQ(told([] { throw ConfigError("got \x1b[2J\xff, expected caf\xc3\xa9"); }).text,
            "penstock: got \\x1b[2J\\xff, expected caf\xc3\xa9\n");
  const Told large = told([] { throw ConfigError("got " + std::string(1000000, 'x')); });
  EXPECT_LT(large.text.size(), 10000U);
  EXPECT_TRUE(has_text(large.text, "(1000004 bytes)"));
}

TEST(FailureDeathTest, AnExceptionThatLeavesAThreadEndsWithTheSameWords) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        cli::report_failure_on_terminate();
        std::thread([] { throw std::runtime_error("out of a thread"); }).join();
      },
      ::testing::ExitedWithCode(cli::kDefect), "penstock: internal error: out of a thread");
}

}  // namespace failure_test
}  // namespace penstock::test
