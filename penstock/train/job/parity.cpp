#include "penstock/train/job/parity.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/checkpoint/files/folder.h"
#include "penstock/checkpoint/files/reader.h"
#include "penstock/checkpoint/tensors/tensor_part.h"
#include "penstock/checkpoint/tensors/writer.h"
#include "penstock/checkpoint_types.h"
#include "penstock/errors.h"
#include "penstock/train/job/configured_model.h"
#include "penstock/train/job/model_stages.h"
#include "penstock/train/job/stage_copies.h"

namespace penstock::train {

namespace {

namespace fs = std::filesystem;
using checkpoint::Checkpoint;
using checkpoint::Section;

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr std::size_t kRowsShown = 12;
// Begins the suffix of a copy of a tensor. Parameter names have no spaces.
constexpr std::string_view kCopyBegins = " (";

// Returns whether a stage's weight gradients are accumulated in microbatch order, as in one process.
bool keeps_order(const schedule::Schedule& schedule) {
  std::map<int, int> last;  // microbatch by stage
  for (const schedule::Row& row : schedule.rows()) {
    for (const schedule::Slot slot : row) {
      for (const schedule::Action& action : slot) {
        if (action.kind() != schedule::ActionKind::Backward &&
            action.kind() != schedule::ActionKind::BackwardWeight)
          continue;
        const int microbatch = *action.microbatch();
        const auto [place, is_first] = last.try_emplace(action.stage(), microbatch);
        if (!is_first && microbatch < place->second) return false;
        place->second = microbatch;
      }
    }
  }
  return true;
}

// Returns whether gradients of one parameter arise on several stages, apart from a tied weight, whose uses
// have their own gradients in one process, too.
bool adds_over_stages(const TrainConfig& config) {
  const auto model = configured_model(config);
  const schedule::Schedule schedule = configured_schedule(config.layout);
  const auto parts = configured_parts(config, model->plan(), parts_of_model(schedule.stages()));
  return std::any_of(
      model->plan().shared.begin(), model->plan().shared.end(), [&](const models::SharedParameter& shared) {
        return models::stages_of_parameter(parts, model->plan(), shared.parameter.name).size() > 1;
      });
}

// The relative error that rounding what stages send each other causes. One process sends nothing: only the
// layout rounds.
double border_rounding(const LayoutConfig& layout) {
  if (layout.pp == 1 || layout.border_dtype == "same") return 0;
  return layout.border_dtype == "fp8" ? 2e-1 : 1e-1;
}

std::string copy_text(const TrainingJob& job, const optim::NamedParameter& parameter) {
  std::string text;
  if (!job.model().shared().counts(parameter.tensor))
    text += fmt::format(" (pipeline rank {})", job.layout().pp());
  else if (!job.model().counts(parameter))
    text += " (second copy)";
  if (const int copy = job.layout().copy_of(parameter.tensor); copy > 0)
    text += fmt::format(" (replica {})", copy);
  return text;
}

std::string original_name(const std::string& name) { return name.substr(0, name.find(kCopyBegins)); }

at::Tensor read_integer(const Checkpoint& side, Section section, const std::string& name) {
  const checkpoint::TensorEntry& entry = *side.tensors(section).at(name).entry;
  const auto dtype = checkpoint::to_scalar_type(entry.dtype);
  if (!dtype)
    throw checkpoint::CheckpointError(describe(fmt::format("{} of {}", name, side.path().string()),
                                               std::string(checkpoint::dtype_code(entry.dtype)),
                                               "an element type that this LibTorch has"));
  at::Tensor values = at::empty(entry.shape, *dtype);
  side.read(section, name, checkpoint::Slice::whole(entry.shape),
            {static_cast<std::uint8_t*>(values.data_ptr()), values.nbytes()});
  return values;
}

void judge(ParityRow& row) {
  if (std::isnan(row.difference)) row.difference = kInfinite;
  if (!(row.relative < kInfinite)) row.relative = row.difference == 0 ? 0 : kInfinite;
  row.ok = row.note.empty() && row.relative <= row.tolerance;
}

// `least`: lower bound of the magnitude that differences are relative to.
ParityRow compare_tensors(ParityRow row, const at::Tensor& expected, const at::Tensor& actual, double least) {
  if (expected.sizes() != actual.sizes() || expected.scalar_type() != actual.scalar_type()) {
    row.difference = row.relative = kInfinite;
    row.note = "different shape or element type";
  } else if (expected.numel() > 0 &&
             std::memcmp(expected.data_ptr(), actual.data_ptr(), expected.nbytes()) != 0) {
    const at::Tensor a = expected.to(at::kDouble), b = actual.to(at::kDouble);
    row.difference = (a - b).abs().max().item<double>();
    row.relative = row.difference / std::max(a.abs().max().item<double>(), least);
  }
  judge(row);
  return row;
}

nlohmann::json losses_json(const StepOutcome& outcome) {
  nlohmann::json losses{{"loss", outcome.loss}};
  for (const LossTerm& term : outcome.auxiliary) losses[term.name] = term.value;
  return losses;
}

// JSON has no NaN: a NaN loss is null.
std::map<std::string, double> losses_of(const Checkpoint& side) {
  std::map<std::string, double> losses;
  const nlohmann::json state = nlohmann::json::parse(side.state_json());
  for (const auto& loss : state.items())
    losses[loss.key()] =
        loss.value().is_number() ? loss.value().get<double>() : std::numeric_limits<double>::quiet_NaN();
  return losses;
}

// The loss of the tokens, and those of the auxiliary losses. A model is cut into other sums of auxiliary
// losses than one process computes, which differ by rounding.
void compare_losses(ParityReport& report, int step, const Checkpoint& one, const Checkpoint& layout,
                    double tolerance) {
  constexpr double kRoundingOfSums = 1e-5;
  const std::map<std::string, double> expected = losses_of(one), actual = losses_of(layout);
  std::map<std::string, double> all = expected;
  all.insert(actual.begin(), actual.end());
  for (const auto& [name, value] : all) {
    ParityRow row{.step = step,
                  .kind = ParityRow::Kind::Loss,
                  .tensor = name,
                  .difference = 0,
                  .relative = 0,
                  .tolerance = name == "loss" ? tolerance : std::max(tolerance, kRoundingOfSums),
                  .note = {},
                  .ok = true};
    if (expected.contains(name) && actual.contains(name)) {
      row.difference = std::abs(expected.at(name) - actual.at(name));
      row.relative = row.difference == 0 ? 0 : row.difference / std::abs(expected.at(name));
    } else {
      row.difference = row.relative = kInfinite;
      row.note = expected.contains(name) ? "only in one process" : "only in the layout";
    }
    judge(row);
    report.rows.push_back(std::move(row));
  }
}

void compare_section(ParityReport& report, int step, const Checkpoint& one, const Checkpoint& layout,
                     Section section, double tolerance) {
  const auto row_of = [&](const std::string& name) {
    return ParityRow{
        .step = step,
        .kind = section == Section::Model ? ParityRow::Kind::Parameter : ParityRow::Kind::Gradient,
        .tensor = name,
        .difference = 0,
        .relative = 0,
        .tolerance = tolerance,
        .note = {},
        .ok = true};
  };
  const auto on_one_side = [&](const std::string& name, const char* note) {
    ParityRow row = row_of(name);
    row.difference = row.relative = kInfinite;
    row.note = note;
    row.ok = false;
    report.rows.push_back(std::move(row));
  };
  // A gradient that is zero except for rounding has no magnitude to compare with.
  constexpr double kRounding = 1e-6;
  double largest = 0;
  for (const auto& [name, place] : one.tensors(section)) {
    const at::Tensor whole = read_integer(one, section, name);
    if (whole.numel() > 0) largest = std::max(largest, whole.abs().max().to(at::kDouble).item<double>());
  }
  const double least = std::isfinite(largest) ? kRounding * largest : 0;
  for (const auto& [name, place] : layout.tensors(section)) {
    const std::string original = original_name(name);
    if (one.tensors(section).contains(original)) {
      report.rows.push_back(compare_tensors(row_of(name), read_integer(one, section, original),
                                            read_integer(layout, section, name), least));
    } else {
      on_one_side(name, "only in the layout");
    }
  }
  for (const auto& [name, place] : one.tensors(section))
    if (!layout.tensors(section).contains(name)) on_one_side(name, "only in one process");
}

const char* kind_text(ParityRow::Kind kind) {
  return kind == ParityRow::Kind::Loss       ? "loss"
         : kind == ParityRow::Kind::Gradient ? "gradient"
                                             : "parameter";
}

}  // namespace

TrainConfig one_process(const TrainConfig& config) {
  TrainConfig one = config;
  one.layout.ranks = one.layout.pp = one.layout.dp = one.layout.shard = one.layout.ep = one.layout.tp =
      one.layout.virtual_stages = 1;
  one.layout.sequence_parallel = false;
  one.layout.schedule = "1F1B";
  one.layout.microbatch_size = config.layout.microbatch_size * config.layout.dp;
  std::erase(one.model.pattern, '|');
  // Graphs must not change anything: what they are compared with runs operator by operator.
  one.training.compile = "off";
  one.training.compile_exact = one.training.compile_check = false;
  one.training.artifact.clear();
  one.training.disable_passes.clear();
  one.training.activation_budget = TrainingConfig().activation_budget;
  one.training.activation_policy.clear();
  // Recomputation must not change anything: what it is compared with keeps all activations.
  one.training.recompute = "none";
  one.training.recompute_stages.clear();
  one.training.recompute_microbatches.clear();
  return one;
}

bool expects_same_bits(const TrainConfig& config) {
  if (config.layout.dp > 1 || config.layout.tp > 1 || config.layout.device == "cuda") return false;
  if (border_rounding(config.layout) > 0) return false;
  // Generated code rounds elsewhere than operators do.
  if (config.training.compile == "fused" && !config.training.compile_exact) return false;
  const schedule::Schedule schedule = configured_schedule(config.layout);
  return schedule.stages().chains().size() == 1 && keeps_order(schedule) && !adds_over_stages(config);
}

ParityTolerance parity_tolerance(const TrainConfig& config) {
  if (expects_same_bits(config)) return {};
  const double arithmetic = config.training.precision == "fp32"   ? 1e-4
                            : config.training.precision == "fp16" ? 5e-3
                                                                  : 3e-2;
  const double gradients = std::max(arithmetic, border_rounding(config.layout));
  return {.gradients = gradients, .parameters = 10 * gradients};
}

void record_side(const comm::World& world, const TrainConfig& config, TrainingData data,
                 const fs::path& folder, int steps, TrainingJob::GradientHook before) {
  TrainingJob job(world, config, std::move(data));
  std::vector<checkpoint::TensorPart> gradients;
  job.set_gradient_hook([&](const std::vector<optim::NamedParameter>& parameters) {
    if (before) before(parameters);
    for (const optim::NamedParameter& parameter : parameters) {
      if (!parameter.tensor.grad().defined()) continue;
      checkpoint::TensorPart part =
          checkpoint::tensor_part(parameter.name + copy_text(job, parameter), parameter.tensor.grad());
      part.local = part.local.clone();  // clipping writes in place
      gradients.push_back(std::move(part));
    }
  });
  checkpoint::WriterOptions options;
  options.files.keep_last = 0;
  checkpoint::CheckpointWriter writer(world, folder, options);
  for (int step = 1; step <= steps; ++step) {
    gradients.clear();
    const StepOutcome outcome = job.train_step();
    checkpoint::CheckpointContents contents;
    for (const optim::NamedParameter& parameter : job.model().parameters())
      contents.model.push_back(
          checkpoint::tensor_part(parameter.name + copy_text(job, parameter), parameter.tensor));
    contents.optimizer = gradients;
    contents.state_json = losses_json(outcome).dump();
    writer.save(step, contents);
  }
  writer.wait();
}

bool ParityReport::ok() const {
  return !rows.empty() && std::all_of(rows.begin(), rows.end(), [](const ParityRow& row) { return row.ok; });
}

ParityReport compare_sides(const fs::path& one, const fs::path& layout, int steps,
                           const ParityTolerance& tolerance) {
  ParityReport report;
  for (int step = 1; step <= steps; ++step) {
    const Checkpoint expected(one / checkpoint::step_folder_name(step)),
        actual(layout / checkpoint::step_folder_name(step));
    compare_losses(report, step, expected, actual, tolerance.gradients);
    compare_section(report, step, expected, actual, Section::Optimizer, tolerance.gradients);
    compare_section(report, step, expected, actual, Section::Model, tolerance.parameters);
  }
  // Failures first, by size; among equals the earliest step, which is closest to the cause.
  std::stable_sort(report.rows.begin(), report.rows.end(), [](const ParityRow& a, const ParityRow& b) {
    if (a.ok != b.ok) return !a.ok;
    if (!a.ok && a.step != b.step) return a.step < b.step;
    return a.relative > b.relative;
  });
  return report;
}

std::string to_text(const ParityReport& report, bool all) {
  std::string text;
  const auto out = std::back_inserter(text);
  const std::size_t shown = all ? report.rows.size() : std::min(report.rows.size(), kRowsShown);
  std::size_t width = std::string_view("tensor").size(), failed = 0, steps = 0;
  for (std::size_t i = 0; i < shown; ++i) width = std::max(width, report.rows[i].tensor.size());
  std::map<ParityRow::Kind, std::pair<std::size_t, double>> kinds;  // count and largest relative difference
  for (const ParityRow& row : report.rows) {
    failed += !row.ok;
    steps = std::max(steps, static_cast<std::size_t>(row.step));
    auto& [count, largest] = kinds[row.kind];
    ++count;
    largest = std::max(largest, row.relative);
  }
  fmt::format_to(out, "{:>4}  {:<9}  {:<{}}  {:>12}  {:>12}  result\n", "step", "what", "tensor", width,
                 "difference", "relative");
  for (std::size_t i = 0; i < shown; ++i) {
    const ParityRow& row = report.rows[i];
    fmt::format_to(out, "{:>4}  {:<9}  {:<{}}  {:>12.4g}  {:>12.4g}  {}{}\n", row.step, kind_text(row.kind),
                   row.tensor, width, row.difference, row.relative, row.ok ? "ok" : "FAIL",
                   row.note.empty() ? "" : ": " + row.note);
  }
  if (shown < report.rows.size())
    fmt::format_to(out, "      ({} more; --all shows them)\n", report.rows.size() - shown);
  for (const auto& [kind, seen] : kinds)
    fmt::format_to(out, "{} {}{} over {} steps, largest relative difference {:.4g}\n", seen.first,
                   kind_text(kind), kind == ParityRow::Kind::Loss ? "es" : "s", steps, seen.second);
  fmt::format_to(out, "{}\n",
                 report.ok() ? std::string("parity: ok")
                             : fmt::format("parity: FAIL, {} of {} differ by more than the tolerance", failed,
                                           report.rows.size()));
  return text;
}

}  // namespace penstock::train
