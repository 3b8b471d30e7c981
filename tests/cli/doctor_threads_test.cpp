// The thread report of `penstock doctor`.
#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "penstock/cli/tensor/doctor_threads.h"
#include "penstock/errors.h"
#include "tests/has_text.h"

namespace penstock::test {
namespace doctor_threads_test {

using cli::ThreadSpeeds;
using comm::BlasThreads;

TEST(DoctorThreads, FasterThreadsDoNotWarn) {
  const std::string text = cli::describe_thread_speeds({BlasThreads::OpenMp, {{1, 10}, {2, 18}}});
  EXPECT_TRUE(has_text(text, "1.80x")) << text;
  EXPECT_FALSE(has_text(text, "warning")) << text;
}

TEST(DoctorThreads, SlowerThreadsAreAWarningWithTheBestCount) {
  const std::string text = cli::describe_thread_speeds({BlasThreads::OpenMp, {{1, 10}, {2, 16}, {4, 8}}});
  EXPECT_TRUE(has_text(text, "4 threads compute at 0.50 times the speed of 2")) << text;
  EXPECT_TRUE(has_text(text, "OMP_NUM_THREADS=2")) << text;
}

TEST(DoctorThreads, TwoPoolsAreAWarningWithTheRemedy) {
  EXPECT_TRUE(has_text(cli::describe_thread_speeds({BlasThreads::OwnPool, {{1, 10}, {2, 16}}}),
                       "install libopenblas0-openmp"));
  EXPECT_FALSE(has_text(cli::describe_thread_speeds({BlasThreads::OwnPool, {{1, 10}}}), "warning"))
      << "one thread has no competitors";
}

TEST(DoctorThreads, ReportsSurviveTheirFile) {
  const std::string path = ::testing::TempDir() + "/doctor_threads.json";
  cli::write_thread_speeds({BlasThreads::OwnPool, {{1, 10.5}, {2, 4}}}, path);
  const ThreadSpeeds read = cli::read_thread_speeds(path);
  EXPECT_EQ(read.blas, BlasThreads::OwnPool);
  ASSERT_EQ(read.speeds.size(), 2u);
  EXPECT_EQ(read.speeds[1].threads, 2);
  EXPECT_EQ(read.speeds[0].gflops, 10.5);
}

TEST(DoctorThreads, AReportThatWasCutOffIsAnErrorWithARemedy) {
  const std::string path = ::testing::TempDir() + "/doctor_threads_cut.json";
  for (const char* text : {"", "{\"blas\":1,\"spee", "{\"blas\":1}", "{\"blas\":1,\"speeds\":[]}"}) {
    std::ofstream(path) << text;
    try {
      cli::read_thread_speeds(path);
      ADD_FAILURE() << text;
    } catch (const StateError& error) {
      EXPECT_TRUE(has_text(error.what(), "set TMPDIR")) << error.what();
    }
  }
}

}  // namespace doctor_threads_test
}  // namespace penstock::test
