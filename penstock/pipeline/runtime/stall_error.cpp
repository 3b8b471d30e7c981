#include "penstock/pipeline/runtime/stall_error.h"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/env.h"
#include "penstock/base/exception_text.h"
#include "penstock/base/log.h"
#include "penstock/comm/transport/liveness.h"

namespace penstock {

namespace {

// Returns the text that the error was created with, without the context that CommError appends.
std::string without_context(const CommError& error) {
  const std::string text = error.what();
  const std::string context = CommError("", error.context()).what();
  return text.ends_with(context) ? text.substr(0, text.size() - context.size()) : text;
}

// A rank that reported its own error has not vanished; one that is gone reports nothing.
std::optional<int> vanished_rank(const CommError& error) {
  const bool reported = dynamic_cast<const comm::PeerFailedError*>(&error) != nullptr;
  return reported ? std::nullopt : error.context().lost_rank;
}

void write_report(const StallReport& report) {
  const auto folder = env_text("PENSTOCK_STALL_DIR");
  if (!folder) return;
  const std::filesystem::path path =
      std::filesystem::path(*folder) / fmt::format("stall-rank{}.json", report.seen_from);
  std::error_code ignored;  // if the folder cannot be created, opening the file fails
  std::filesystem::create_directories(*folder, ignored);
  std::ofstream file(path, std::ios::trunc);
  file << report.to_json();
  file.close();
  if (!file)
    log().error(
        "pipeline: the stall report could not be written to {}; set PENSTOCK_STALL_DIR to a writable folder",
        path.string());
}

template <class Error>
[[noreturn]] void report_and_throw(const Error& error, RankPlace own, StepWatch* watch) {
  if (watch == nullptr) throw error;
  own.error = first_line(without_context(error));
  // For sends that the program does not know, and for collectives, the error has the peer.
  if (own.state == RankPlace::State::Finishing && error.context().peer)
    own.waits_for = {*error.context().peer};
  const int rank = own.rank;
  std::vector<RankPlace> places = watch->roll_call(own, vanished_rank(error));
  // A rank that failed and exited before it could be asked: its reason is in the error.
  for (RankPlace& place : places)
    if (place.rank == error.context().lost_rank && place.state == RankPlace::State::NoStatus) {
      place.state = RankPlace::State::Lost;
      place.error = own.error;
    }
  const StallReport report = make_stall_report(rank, std::move(places));
  const std::string text = report.text();
  log().error("{}", text);
  write_report(report);
  throw Error(fmt::format("{}\n{}\n", without_context(error), text), error.context());
}

}  // namespace

void throw_with_report(const TimeoutError& error, RankPlace own, StepWatch* watch) {
  report_and_throw(error, std::move(own), watch);
}

void throw_with_report(const PeerLostError& error, RankPlace own, StepWatch* watch) {
  report_and_throw(error, std::move(own), watch);
}

void post_last_status(const std::exception& error, RankPlace own, StepWatch* watch) {
  if (watch == nullptr) return;
  own.error = first_line(error.what());
  own.own_error = dynamic_cast<const CommError*>(&error) == nullptr;
  watch->post_last_place(own);
}

}  // namespace penstock
