#include "penstock/train/report/metrics_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string_view>
#include <system_error>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/log.h"
#include "penstock/errors.h"
#include "penstock/train/report/metrics.h"

namespace penstock::train {

namespace {

double unix_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Returns the end of the last complete line, or -1 if the file cannot be read.
std::int64_t end_of_lines(int file) {
  const std::int64_t size = ::lseek(file, 0, SEEK_END);
  std::array<char, 4096> block;
  std::int64_t end = size;
  while (end > 0) {
    const std::int64_t begin = std::max<std::int64_t>(0, end - static_cast<std::int64_t>(block.size()));
    const auto length = static_cast<std::size_t>(end - begin);
    if (::pread(file, block.data(), length, begin) != static_cast<ssize_t>(length)) return -1;
    const std::size_t at = std::string_view(block.data(), length).rfind('\n');
    if (at != std::string_view::npos) return begin + static_cast<std::int64_t>(at) + 1;
    end = begin;
  }
  return size < 0 ? -1 : 0;
}

}  // namespace

MetricsFile::MetricsFile(std::function<double()> clock) : clock_(clock ? std::move(clock) : unix_seconds) {}

MetricsFile::~MetricsFile() {
  if (file_ >= 0) ::close(file_);
}

void MetricsFile::open(const std::filesystem::path& folder) {
  if (file_ >= 0) ::close(file_);
  folder_ = folder;
  missing_ = all_missing_ = 0;
  std::error_code error;
  std::filesystem::create_directories(folder, error);  // open() below reports errors
  const std::filesystem::path path = folder / kName;
  file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_APPEND, 0644);
  size_ = file_ < 0 ? -1 : end_of_lines(file_);
  if (size_ < 0 || ::ftruncate(file_, size_) != 0)
    throw ConfigError(describe("metrics of the run", path.string() + ": " + std::strerror(errno),
                               "a file that can be written", "set output.run_folder to a writable folder"));
}

bool MetricsFile::write(const std::string& line) {
  std::size_t written = 0;
  while (written < line.size()) {
    const ssize_t count = ::write(file_, line.data() + written, line.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    written += static_cast<std::size_t>(count);
  }
  if (written == line.size()) {
    size_ += static_cast<std::int64_t>(written);
    return true;
  }
  const int reason = errno;
  if (written > 0 && ::ftruncate(file_, size_) != 0)
    log().warn("train: {} contains an incomplete line", (folder_ / kName).string());
  errno = reason;
  return false;
}

void MetricsFile::append(const std::string& line) {
  PENSTOCK_INVARIANT(file_ >= 0, "on_start is called before other events");
  // A record about missing lines is written in their place, together with the next line.
  if (write(missing_ > 0 ? missing_line(missing_, clock_()) + line : line)) {
    missing_ = 0;
    return;
  }
  const int reason = errno;
  if (all_missing_ == 0)
    log().warn("train: {} cannot be written ({}); training continues without these records",
               (folder_ / kName).string(), std::strerror(reason));
  ++missing_;
  ++all_missing_;
}

void MetricsFile::on_start(const RunDescription& run) {
  open(run.folder);
  append(start_line(run, clock_()));
}

void MetricsFile::on_step(const StepOutcome& outcome, const StepExtras& extras) {
  append(step_line(outcome, extras, clock_()));
}

void MetricsFile::on_validation(std::int64_t step, double loss, double seconds) {
  append(validation_line({.time = clock_(), .step = step, .loss = loss, .seconds = seconds}));
}

void MetricsFile::on_checkpoint(std::int64_t step, const checkpoint::SaveStall& stall) {
  append(checkpoint_line({.time = clock_(), .step = step, .stall = stall}));
}

void MetricsFile::on_checkpoint_failed(std::int64_t step, const std::string& error) {
  append(failed_checkpoint_line({.time = clock_(), .step = step, .error = error}));
}

void MetricsFile::on_trace(std::int64_t step, const std::filesystem::path& path) {
  append(trace_line(
      {.time = clock_(), .step = step, .path = path.lexically_proximate(folder_).generic_string()}));
}

void MetricsFile::on_end(RunEnd end, std::int64_t step) {
  append(end_line({.time = clock_(), .step = step, .end = end}));
  if (all_missing_ > 0)
    log().warn("train: {} line{} of {} could not be written", all_missing_, all_missing_ == 1 ? "" : "s",
               (folder_ / kName).string());
}

}  // namespace penstock::train
