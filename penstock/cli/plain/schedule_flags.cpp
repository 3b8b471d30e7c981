#include "penstock/cli/plain/schedule_flags.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <system_error>

#include "penstock/base/describe.h"
#include "penstock/base/files.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/cli/common/number_options.h"
#include "penstock/errors.h"
#include "penstock/plan/cost/cost_text.h"

namespace penstock::cli {

namespace {

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Close>;

// The same limits as in the configuration; larger schedules would not fit into memory.
constexpr int kMostRanks = 65536;
constexpr int kMostMicrobatches = 1 << 20;

std::vector<std::string> kind_names() {
  std::vector<std::string> names;
  for (const schedule::ScheduleKind kind : schedule::all_schedule_kinds()) names.emplace_back(to_text(kind));
  names.emplace_back("auto");
  return names;
}

}  // namespace

void add_size_flags(CLI::App& command, ShapeFlags& flags, const std::string& stages_help) {
  add_whole(command, "--ranks", flags.ranks, 1, kMostRanks, "Pipeline ranks")->type_name("P");
  add_whole(command, "--stages-per-rank", flags.stages_per_rank, 1, kMostRanks, stages_help)->type_name("V");
  add_whole(command, "--microbatches", flags.microbatches, 1, kMostMicrobatches, "Microbatches per step")
      ->type_name("M");
}

void add_shape_flags(CLI::App& command, ShapeFlags& flags) {
  command
      .add_option("--kind", flags.kind,
                  fmt::format("Schedule kind, case-insensitive: {}", fmt::join(kind_names(), ", ")))
      ->type_name("K");
  add_size_flags(command, flags,
                 "Stages per rank (default: as the kind requires, 2 for interleaved kinds, 1 for auto)");
  add_whole(command, "--group-size", flags.group_size, 1, kMostMicrobatches,
            "Interleaved kinds: microbatches that a rank runs on one stage before it switches to the next")
      ->type_name("G");
}

void add_cost_flags(CLI::App& command, CostFlags& flags) {
  command
      .add_option("--cost", flags.cost,
                  "Times, such as F=1,I=1,W=1,send=0.1; also B, bytes, bandwidth, unshard, reduce, overlap; "
                  "one value per stage with colons: F=1:1:2:1")
      ->type_name("C");
  command
      .add_option("--memory", flags.memory,
                  "Bytes, such as params=2G,grads=2G,act=100M,split=50M; also unsharded; one value per stage "
                  "with colons")
      ->type_name("B");
  command.add_option("--communication", flags.communication, "overlapped or blocking (default overlapped)")
      ->type_name("X");
}

void add_limit_flags(CLI::App& command, CostFlags& flags) {
  command
      .add_option("--max-activations", flags.max_activations,
                  "Maximum microbatches in flight: N, one value per rank separated by colons, or 1f1b")
      ->type_name("N");
  command
      .add_option("--max-bytes", flags.max_bytes,
                  "Maximum memory of a rank: 80G, or one value per rank separated by colons")
      ->type_name("B");
}

plan::CostModel cost_model(const CostFlags& flags) {
  plan::CostModel model;
  if (!flags.cost.empty()) plan::apply_cost_text(model, flags.cost);
  if (!flags.memory.empty()) plan::apply_memory_text(model, flags.memory);
  model.communication = plan::parse_communication(flags.communication);
  return model;
}

std::vector<plan::MemoryLimit> memory_limits(const CostFlags& flags, int ranks, int microbatches) {
  std::vector<plan::MemoryLimit> limits;
  const auto widen = [&](std::string_view flag, std::size_t count) {
    if (count != 1 && count != static_cast<std::size_t>(ranks)) {
      throw ConfigError(describe(flag, count_of(count, "value"),
                                 fmt::format("one value, or one for each of {} ranks", ranks)));
    }
    limits.resize(static_cast<std::size_t>(ranks));
  };
  if (to_lower(flags.max_activations) == "1f1b") {
    limits = plan::one_f_one_b_limits(ranks, microbatches);
  } else if (!flags.max_activations.empty()) {
    std::vector<int> values;
    for (std::size_t begin = 0; begin <= flags.max_activations.size();) {
      const std::size_t end = std::min(flags.max_activations.find(':', begin), flags.max_activations.size());
      values.push_back(static_cast<int>(
          read_integer("--max-activations", flags.max_activations.substr(begin, end - begin), 0, 1 << 30)));
      begin = end + 1;
    }
    widen("--max-activations", values.size());
    for (std::size_t rank = 0; rank < limits.size(); ++rank)
      limits[rank].activations = values[values.size() == 1 ? 0 : rank];
  }
  if (!flags.max_bytes.empty()) {
    const auto values = plan::parse_bytes_list("--max-bytes", flags.max_bytes);
    widen("--max-bytes", values.size());
    for (std::size_t rank = 0; rank < limits.size(); ++rank)
      limits[rank].bytes = values[values.size() == 1 ? 0 : rank];
  }
  return limits;
}

void require_auto_for_limits(const CLI::App& command, const ShapeFlags& flags) {
  if (is_auto(flags)) return;
  refuse_options(command, {"--max-activations", "--max-bytes"}, "for a fixed schedule",
                 "leave it out, or choose --kind auto");
}

bool is_auto(const ShapeFlags& flags) { return to_lower(flags.kind) == "auto"; }

schedule::PipelineShape shape_of(const ShapeFlags& flags) {
  const auto require = [](const char* flag, int value) {
    if (value == 0) throw ConfigError(describe(flag, "nothing", "a whole number of at least 1"));
  };
  require("--ranks", flags.ranks);
  require("--microbatches", flags.microbatches);
  schedule::PipelineShape shape;
  shape.ranks = flags.ranks;
  shape.microbatches = flags.microbatches;
  shape.stages_per_rank = flags.stages_per_rank;
  if (shape.stages_per_rank == 0) {
    shape.stages_per_rank = is_auto(flags) || flags.kind.empty()
                                ? 1
                                : default_stages_per_rank(schedule::schedule_kind(flags.kind));
  }
  if (flags.group_size > 0) shape.group_size = flags.group_size;
  return shape;
}

schedule::Schedule schedule_of(const ShapeFlags& flags, const CostFlags& costs) {
  if (flags.kind.empty())
    throw ConfigError(describe("--kind", "nothing", fmt::format("one of {}", fmt::join(kind_names(), ", "))));
  try {
    if (is_auto(flags) && flags.group_size > 0)
      throw ConfigError(
          "--group-size has no effect with --kind auto, which orders microbatches itself; leave it out");
    const schedule::PipelineShape shape = shape_of(flags);
    if (!is_auto(flags)) return generate(schedule::schedule_kind(flags.kind), shape);
    plan::AutoRequest request;
    request.shape = shape;
    request.model = cost_model(costs);
    request.limits = memory_limits(costs, shape.ranks, shape.microbatches);
    request.placements = {schedule::StagePlacement::Loop, schedule::StagePlacement::V};
    return plan::auto_schedule(request).schedule;
  } catch (const ConfigError&) {
    throw;
  } catch (const ValueError& error) {
    throw ConfigError(error.what());  // on the command line, an invalid shape is a usage error
  }
}

std::string one_of(std::string_view flag, std::string_view value, const std::vector<std::string>& names) {
  const std::string wanted = to_lower(value);
  for (const std::string& name : names) {
    if (to_lower(name) == wanted) return name;
  }
  const std::string nearest = nearest_name(wanted, names);
  throw ConfigError(describe(flag, quote(value), fmt::format("one of {}", fmt::join(names, ", ")),
                             nearest.empty() ? "" : fmt::format("did you mean {}?", nearest)));
}

std::string read_text(const std::string& path) {
  if (path != "-")
    return read_file(path, "schedule", "give a file written by penstock schedule, or - for standard input");
  std::string text;
  char buffer[65536];
  while (const std::size_t count = std::fread(buffer, 1, sizeof buffer, stdin)) text.append(buffer, count);
  if (std::ferror(stdin) != 0)
    throw ConfigError(describe("standard input", std::strerror(errno), "a schedule that can be read"));
  return text;
}

void write_text(const std::string& path, std::string_view text) {
  const bool standard = path.empty() || path == "-";
  // Replaces an existing file as a whole, so that a full disk does not destroy it. Pipes and devices are
  // written directly.
  std::error_code error;
  const bool replaces = !standard && std::filesystem::is_regular_file(path, error);
  const std::string place = replaces ? std::filesystem::canonical(path).string() : path;
  const std::string draft = replaces ? fmt::format("{}.writing-{}", place, ::getpid()) : path;
  File opened(standard ? nullptr : std::fopen(draft.c_str(), "wb"));
  std::FILE* file = standard ? stdout : opened.get();
  const auto refuse = [&] {
    const int reason = errno;
    if (replaces) std::remove(draft.c_str());
    throw ConfigError(
        describe(standard ? "standard output" : path, std::strerror(reason), "a file that can be written"));
  };
  if (file == nullptr) refuse();
  if (std::fwrite(text.data(), 1, text.size(), file) != text.size() || std::fflush(file) != 0) refuse();
  if (replaces && std::rename(draft.c_str(), place.c_str()) != 0) refuse();
}

}  // namespace penstock::cli
