#include "penstock/base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>

#include <memory>
#include <string>

#include "penstock/base/env.h"

namespace penstock {

namespace {

std::shared_ptr<spdlog::logger> make_logger() {
  // stderr: standard output belongs to results (CSV, JSON), which people pipe into files.
  auto logger = std::make_shared<spdlog::logger>("penstock", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
  logger->set_pattern("%^[%T.%e %L]%$ %v");
  const std::string level = env_choice("PENSTOCK_LOG", {"trace", "debug", "info", "warn", "error", "off"}, "info");
  logger->set_level(spdlog::level::from_str(level == "error" ? "err" : level));
  logger->flush_on(spdlog::level::warn);
  return logger;
}

}  // namespace

spdlog::logger& log() {
  static const std::shared_ptr<spdlog::logger> logger = make_logger();
  return *logger;
}

void set_log_rank(int rank) { log().set_pattern("%^[%T.%e %L rank " + std::to_string(rank) + "]%$ %v"); }

}  // namespace penstock
