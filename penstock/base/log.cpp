#include "penstock/base/log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_color_sinks.h>

#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "penstock/base/env.h"
#include "penstock/base/printable.h"

namespace penstock {

namespace {

// The message without control bytes: it may quote damaged files or user input.
class PrintableMessage final : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm&, spdlog::memory_buf_t& out) override {
    const std::string text = printable(std::string_view(message.payload.data(), message.payload.size()));
    out.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<custom_flag_formatter> clone() const override {
    return std::make_unique<PrintableMessage>();
  }
};

void set_pattern(spdlog::logger& logger, const std::string& rank) {
  auto formatter = std::make_unique<spdlog::pattern_formatter>();
  formatter->add_flag<PrintableMessage>('*').set_pattern("%^[%T.%e %L" + rank + "]%$ %*");
  logger.set_formatter(std::move(formatter));
}

std::shared_ptr<spdlog::logger> make_logger() {
  // stderr: standard output is reserved for results (CSV, JSON) that users pipe into files.
  auto logger =
      std::make_shared<spdlog::logger>("penstock", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
  set_pattern(*logger, "");
  const std::string level =
      env_choice("PENSTOCK_LOG", {"trace", "debug", "info", "warn", "error", "off"}, "info");
  logger->set_level(spdlog::level::from_str(level == "error" ? "err" : level));
  logger->flush_on(spdlog::level::warn);
  return logger;
}

}  // namespace

spdlog::logger& log() {
  static const std::shared_ptr<spdlog::logger> logger = make_logger();
  return *logger;
}

void set_log_rank(int rank) { set_pattern(log(), " rank " + std::to_string(rank)); }

}  // namespace penstock
