#include "penstock/train/report/metrics.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <string_view>
#include <system_error>
#include <variant>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/train/config/config_fields.h"

namespace penstock::train {

namespace {

using Json = nlohmann::ordered_json;

std::string line_of(const Json& json) {
  // Paths may contain invalid UTF-8, which JSON does not allow.
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Json config_json(const TrainConfig& config) {
  Json all = Json::object();
  for (const ConfigField& field : config_fields())
    std::visit([&](const auto& value) { all[std::string(field.section)][std::string(field.key)] = value; },
               field.get(config));
  return all;
}

// Formats a value of the configuration as TOML.
std::string value_text(const Json& value) {
  if (!value.is_array()) return value.dump(-1, ' ', false, Json::error_handler_t::replace);
  std::string text = "[";
  for (const Json& each : value)
    text += (text.size() > 1 ? ", " : "") + each.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text + "]";
}

// One line of the file. Errors contain the line number.
class Line {
 public:
  Line(const std::string& text, const std::filesystem::path& path, std::size_t number)
      : where_(fmt::format("{}:{}", path.string(), number)) {
    json_ = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (json_.is_discarded() || !json_.is_object()) fail(text.substr(0, 60), "one JSON object");
  }

  [[noreturn]] void fail(std::string_view actual, std::string_view expected) const {
    throw ConfigError(describe(where_, actual, expected, "use an unmodified file, or remove the line"));
  }

  bool has(std::string_view key) const { return json_.contains(std::string(key)); }
  const Json& at(std::string_view key) const { return at(json_, key); }
  const Json& at(const Json& object, std::string_view key) const {
    const auto found = object.is_object() ? object.find(std::string(key)) : object.end();
    if (!object.is_object() || found == object.end())
      fail(fmt::format("no key \"{}\"", key), "the format of docs/metrics.md");
    return *found;
  }

  std::string text(std::string_view key) const {
    const Json& value = at(key);
    if (!value.is_string()) fail(fmt::format("\"{}\": {}", key, short_text(value)), "a string");
    return value.get<std::string>();
  }
  // null stands for a non-finite value.
  double number(std::string_view key) const { return number(json_, key); }
  double number(const Json& object, std::string_view key) const {
    const Json& value = at(object, key);
    if (value.is_null()) return std::numeric_limits<double>::quiet_NaN();
    if (!value.is_number()) fail(fmt::format("\"{}\": {}", key, short_text(value)), "a number");
    return value.get<double>();
  }
  std::int64_t count(std::string_view key) const {
    const Json& value = at(key);
    if (!value.is_number_integer() ||
        (value.is_number_unsigned() &&
         value.get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) ||
        value.get<std::int64_t>() < 0)
      fail(fmt::format("\"{}\": {}", key, short_text(value)), "a whole number of at least 0");
    return value.get<std::int64_t>();
  }
  bool flag(std::string_view key) const {
    const Json& value = at(key);
    if (!value.is_boolean()) fail(fmt::format("\"{}\": {}", key, short_text(value)), "true or false");
    return value.get<bool>();
  }

 private:
  static std::string short_text(const Json& value) {
    return value.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 60);
  }

  std::string where_;
  Json json_;
};

StartMetrics start_of(const Line& line) {
  StartMetrics start;
  start.time = line.number("time");
  const Json& config = line.at("config");
  if (!config.is_object()) line.fail("\"config\"", "an object of sections");
  for (const auto& section : config.items()) {
    if (!section.value().is_object())
      line.fail(fmt::format("\"config\": {}", section.key()), "an object of fields");
    for (const auto& field : section.value().items())
      start.config.emplace_back(section.key() + "." + field.key(), value_text(field.value()));
  }
  start.steps = line.count("steps");
  start.ranks =
      static_cast<int>(std::min<std::int64_t>(line.count("ranks"), std::numeric_limits<int>::max()));
  start.device = line.text("device");
  start.libtorch = line.text("libtorch");
  start.parameters = line.count("parameters");
  start.flops_per_token = line.number("flops_per_token");
  start.peak_flops = line.number("peak_flops");
  const Json& partition = line.at("partition");
  if (!partition.is_array()) line.fail("\"partition\"", "a list of strings");
  for (const Json& stage : partition) {
    if (!stage.is_string()) line.fail("\"partition\"", "a list of strings");
    start.partition.push_back(stage.get<std::string>());
  }
  start.tokens_per_step = line.count("tokens_per_step");
  start.training_tokens = static_cast<std::uint64_t>(line.count("training_tokens"));
  start.validation_tokens = static_cast<std::uint64_t>(line.count("validation_tokens"));
  start.first_step = line.count("first_step");
  start.resumed_from = line.text("resumed_from");
  return start;
}

std::vector<LossTerm> auxiliary_of(const Line& line) {
  const Json& all = line.at("auxiliary");
  if (!all.is_object()) line.fail("\"auxiliary\"", "an object of losses");
  std::vector<LossTerm> terms;
  for (const auto& loss : all.items())
    terms.push_back({.name = loss.key(),
                     .value = line.number(loss.value(), "value"),
                     .weight = line.number(loss.value(), "weight")});
  return terms;
}

void read_compiled(const Line& line, StepOutcome& outcome) {
  const Json& all = line.at("compiled");
  if (!all.is_object() || !all.contains("here") || !all["here"].is_array())
    line.fail("\"compiled\"", "an object with first, again and a list here");
  outcome.first_captures = std::llround(line.number(all, "first"));
  outcome.recaptures = std::llround(line.number(all, "again"));
  // Files of earlier versions have neither numbers of loaded graphs nor sources nor deferred operators.
  if (all.contains("loaded")) outcome.loads = std::llround(line.number(all, "loaded"));
  for (const Json& each : all["here"]) {
    if (!each.is_object() || !each.contains("reason") || !each["reason"].is_string())
      line.fail("\"compiled\"", "graphs with a reason");
    if (each.contains("source") && !each["source"].is_string())
      line.fail("\"compiled\"", "graphs whose source is a text");
    outcome.compiled.push_back(
        {.stage = static_cast<int>(line.number(each, "stage")),
         .graph = std::llround(line.number(each, "graph")),
         .nodes = std::llround(line.number(each, "nodes")),
         .deferred = each.contains("deferred") ? std::llround(line.number(each, "deferred")) : 0,
         .seconds = line.number(each, "seconds"),
         .reason = each["reason"].get<std::string>(),
         .source = each.value("source", std::string("captured"))});
  }
}

StepMetrics step_of(const Line& line) {
  StepMetrics step;
  step.time = line.number("time");
  step.outcome.step = line.count("step");
  step.outcome.loss = line.number("loss");
  step.outcome.grad_norm = line.number("grad_norm");
  step.outcome.lr = line.number("lr");
  step.outcome.loss_scale = line.number("loss_scale");
  step.outcome.skipped = line.flag("skipped");
  step.outcome.tokens = line.count("tokens");
  step.tokens_per_second = line.number("tokens_per_second");
  const Json& times = line.at("times");
  step.outcome.times = {.data = line.number(times, "data"),
                        .schedule = line.number(times, "schedule"),
                        .sync = line.number(times, "sync"),
                        .update = line.number(times, "update"),
                        .total = line.number(times, "total")};
  step.resident_bytes = line.count("resident_bytes");
  step.device_bytes = line.count("device_bytes");
  if (line.has("auxiliary")) step.outcome.auxiliary = auxiliary_of(line);
  if (line.has("compiled")) read_compiled(line, step.outcome);
  if (line.has("border_error")) step.outcome.border_error = line.number("border_error");
  return step;
}

EndMetrics end_of(const Line& line) {
  EndMetrics end{.time = line.number("time"), .step = line.count("step")};
  const std::string how = line.text("end");
  for (const RunEnd each : {RunEnd::Finished, RunEnd::Stopped, RunEnd::TimeLimit, RunEnd::NotSaved})
    if (how == to_text(each)) {
      end.end = each;
      return end;
    }
  line.fail(fmt::format("\"end\": \"{}\"", how), "finished, stopped, time limit or not saved");
}

std::int64_t step_number(const StepMetrics& step) { return step.outcome.step; }
template <class Entry>
std::int64_t step_number(const Entry& entry) {
  return entry.step;
}

// Removes the entries of steps after `step`. Returns the number of removed lines.
template <class Entry>
std::int64_t drop_after(std::vector<Entry>& entries, std::int64_t step) {
  const auto first = std::find_if(entries.begin(), entries.end(),
                                  [&](const Entry& entry) { return step_number(entry) > step; });
  const std::int64_t dropped = entries.end() - first;
  entries.erase(first, entries.end());
  return dropped;
}

// Keeps the entries in ascending order; a later line replaces an earlier one.
template <class Entry>
std::int64_t put(std::vector<Entry>& entries, Entry entry) {
  const std::int64_t dropped = drop_after(entries, step_number(entry) - 1);
  entries.push_back(std::move(entry));
  return dropped;
}

void add(RunMetrics& metrics, const Line& line) {
  const std::string type = line.text("type");
  if (type == "start") {
    StartMetrics start = start_of(line);
    metrics.repeated_steps += drop_after(metrics.steps, start.first_step);
    // A run that starts over repeats the validation before the first step.
    drop_after(metrics.validations, start.resumed_from.empty() ? -1 : start.first_step);
    drop_after(metrics.checkpoints, start.first_step);
    drop_after(metrics.failed_checkpoints, start.first_step);
    drop_after(metrics.traces, start.first_step);
    metrics.end.reset();
    metrics.starts.push_back(std::move(start));
  } else if (type == "step") {
    metrics.repeated_steps += put(metrics.steps, step_of(line));
  } else if (type == "validation") {
    put(metrics.validations, {.time = line.number("time"),
                              .step = line.count("step"),
                              .loss = line.number("loss"),
                              .seconds = line.number("seconds")});
  } else if (type == "checkpoint") {
    put(metrics.checkpoints, {.time = line.number("time"),
                              .step = line.count("step"),
                              .stall = {.waiting = line.number("waiting"),
                                        .planning = line.number("planning"),
                                        .copying = line.number("copying")}});
  } else if (type == "checkpoint_failed") {
    metrics.failed_checkpoints.push_back(
        {.time = line.number("time"), .step = line.count("step"), .error = line.text("error")});
  } else if (type == "missing") {
    metrics.missing_lines += line.count("lines");
  } else if (type == "trace") {
    put(metrics.traces, {.time = line.number("time"), .step = line.count("step"), .path = line.text("path")});
  } else if (type == "end") {
    metrics.end = end_of(line);
  }
}

}  // namespace

std::string StartMetrics::value(std::string_view name) const {
  for (const auto& [key, text] : config)
    if (key == name) return text;
  return {};
}

std::string_view to_text(RunEnd end) {
  switch (end) {
    case RunEnd::Finished:
      return "finished";
    case RunEnd::Stopped:
      return "stopped";
    case RunEnd::TimeLimit:
      return "time limit";
    case RunEnd::NotSaved:
      return "not saved";
  }
  return "";
}

std::string start_line(const RunDescription& run, double time) {
  return line_of({{"type", "start"},
                  {"time", time},
                  {"steps", run.config.training.steps},
                  {"first_step", run.first_step},
                  {"resumed_from", run.resumed_from},
                  {"ranks", run.ranks},
                  {"device", run.device},
                  {"libtorch", run.libtorch},
                  {"parameters", run.parameters},
                  {"flops_per_token", run.flops_per_token},
                  {"peak_flops", run.peak_flops},
                  {"partition", run.partition},
                  {"tokens_per_step", run.tokens_per_step},
                  {"training_tokens", run.training_tokens},
                  {"validation_tokens", run.validation_tokens},
                  {"config", config_json(run.config)}});
}

std::string step_line(const StepOutcome& outcome, const StepExtras& extras, double time) {
  Json line{{"type", "step"},
            {"step", outcome.step},
            {"loss", outcome.loss},
            {"grad_norm", outcome.grad_norm},
            {"lr", outcome.lr},
            {"loss_scale", outcome.loss_scale},
            {"skipped", outcome.skipped},
            {"tokens", outcome.tokens},
            {"tokens_per_second", extras.tokens_per_second},
            {"times",
             {{"data", outcome.times.data},
              {"schedule", outcome.times.schedule},
              {"sync", outcome.times.sync},
              {"update", outcome.times.update},
              {"total", outcome.times.total}}},
            {"resident_bytes", extras.resident_bytes},
            {"device_bytes", extras.device_bytes}};
  if (outcome.border_error > 0) line["border_error"] = outcome.border_error;
  if (outcome.first_captures + outcome.recaptures + outcome.loads > 0) {
    Json here = Json::array();
    for (const CompiledForward& forward : outcome.compiled)
      here.push_back({{"stage", forward.stage},
                      {"graph", forward.graph},
                      {"nodes", forward.nodes},
                      {"deferred", forward.deferred},
                      {"seconds", forward.seconds},
                      {"reason", forward.reason},
                      {"source", forward.source}});
    line["compiled"] = {{"first", outcome.first_captures},
                        {"again", outcome.recaptures},
                        {"loaded", outcome.loads},
                        {"here", here}};
  }
  for (const LossTerm& term : outcome.auxiliary)
    line["auxiliary"][term.name] = {{"value", term.value}, {"weight", term.weight}};
  line["time"] = time;
  return line_of(line);
}

std::string validation_line(const ValidationMetrics& validation) {
  return line_of({{"type", "validation"},
                  {"step", validation.step},
                  {"loss", validation.loss},
                  {"seconds", validation.seconds},
                  {"time", validation.time}});
}

std::string checkpoint_line(const CheckpointMetrics& checkpoint) {
  const checkpoint::SaveStall& stall = checkpoint.stall;
  return line_of({{"type", "checkpoint"},
                  {"step", checkpoint.step},
                  {"waiting", stall.waiting},
                  {"planning", stall.planning},
                  {"copying", stall.copying},
                  {"time", checkpoint.time}});
}

std::string failed_checkpoint_line(const FailedCheckpointMetrics& failed) {
  return line_of(
      {{"type", "checkpoint_failed"}, {"step", failed.step}, {"error", failed.error}, {"time", failed.time}});
}

std::string missing_line(std::int64_t lines, double time) {
  return line_of({{"type", "missing"}, {"lines", lines}, {"time", time}});
}

std::string trace_line(const TraceMetrics& trace) {
  return line_of({{"type", "trace"}, {"step", trace.step}, {"path", trace.path}, {"time", trace.time}});
}

std::string end_line(const EndMetrics& end) {
  return line_of({{"type", "end"}, {"step", end.step}, {"end", to_text(end.end)}, {"time", end.time}});
}

RunMetrics read_metrics(const std::filesystem::path& path) {
  std::error_code error;
  const std::uint64_t bytes = std::filesystem::file_size(path, error);
  std::ifstream file(path, std::ios::binary);
  if (error || !file)
    throw ConfigError(describe("metrics", path.string(), "a file that can be read",
                               "give the folder of a penstock train run"));
  if (bytes > kMaxMetricsBytes)
    throw ConfigError(describe(path.string(), fmt::format("{} bytes", bytes),
                               fmt::format("at most {}", kMaxMetricsBytes), "raise output.metrics_every"));
  RunMetrics metrics;
  std::string text;
  for (std::size_t number = 1; std::getline(file, text); ++number) {
    if (text.size() > kMaxLineBytes)
      throw ConfigError(
          describe(fmt::format("{}:{}", path.string(), number), fmt::format("{} bytes", text.size()),
                   fmt::format("a line of at most {}", kMaxLineBytes), "use an unmodified file"));
    // A line without a newline is the last one and may be incomplete.
    if (file.eof() && !Json::accept(text)) {
      metrics.truncated = true;
      break;
    }
    add(metrics, Line(text, path, number));
  }
  if (metrics.starts.empty())
    throw ConfigError(describe(path.string(), metrics.steps.empty() ? "no records" : "no start record",
                               "metrics written by penstock train",
                               "give the folder of a penstock train run"));
  return metrics;
}

}  // namespace penstock::train
