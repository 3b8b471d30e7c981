#include "penstock/train/trainer.h"

#include <fmt/format.h>
#include <torch/cuda.h>

#include <chrono>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

#include "penstock/base/errors.h"
#include "penstock/base/log.h"
#include "penstock/checkpoint/world_meeting.h"
#include "penstock/models/options.h"
#include "penstock/torch/device_memory.h"
#include "penstock/torch/version.h"
#include "penstock/train/elapsed.h"
#include "penstock/train/make_shards.h"
#include "penstock/train/peak_flops.h"
#include "penstock/train/not_finite.h"
#include "penstock/train/process_memory.h"

namespace penstock::train {

namespace {

using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

std::atomic<bool> stop_flag{false};

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::stringstream all(text);
  for (std::string line; std::getline(all, line);) lines.push_back(line);
  return lines;
}

}  // namespace

void request_stop() noexcept { stop_flag = true; }
bool stop_requested() noexcept { return stop_flag; }

struct Trainer::Impl {
  Impl(const comm::World& the_world, const TrainConfig& the_config, fs::path the_folder, std::vector<Observer*> the_observers)
      : world(the_world),
        config(the_config),
        folder(std::move(the_folder)),
        observers(world.rank() == 0 ? std::move(the_observers) : std::vector<Observer*>{}),
        data(open_data(world, config, folder)),
        job(world, config, data),
        checkpoints(config.checkpoint.folder.empty() ? folder / "checkpoints" : fs::path(config.checkpoint.folder)),
        writer(world, checkpoints, {.files = {.max_file_bytes = std::uint64_t{5} << 30, .block_bytes = std::uint64_t{4} << 20, .keep_last = static_cast<int>(config.checkpoint.keep), .at_phase = {}, .fault = {}}, .timeout = std::chrono::minutes(10)}) {
    resume();
    describe_run();
  }

  template <class Call>
  void tell(Call call) {
    for (Observer* observer : observers) call(*observer);
  }

  void resume() {
    if (config.checkpoint.resume == "never") return;
    checkpoint::WorldMeeting meeting(world);
    const checkpoint::OpenPolicy policy{.verify = true, .allow_fallback = config.checkpoint.fallback};
    if (config.checkpoint.resume != "auto") {
      const checkpoint::Checkpoint opened = checkpoint::open_checkpoint(meeting, config.checkpoint.resume, policy);
      job.load(opened);
      resumed_from = opened.path().string();
    } else if (const auto opened = checkpoint::open_latest(meeting, checkpoints, policy)) {
      for (const std::string& skipped : opened->skipped)
        if (world.rank() == 0) log().warn("train: {}; an older checkpoint is used", skipped);
      job.load(opened->checkpoint);
      resumed_from = opened->checkpoint.path().string();
    }
    if (!resumed_from.empty() && world.rank() == 0) log().info("train: continues after step {} from {}", job.steps_done(), resumed_from);
  }

  void describe_run() {
    const models::TransformerOptions options = transformer_options(config.model);
    description.config = config;
    description.folder = folder;
    description.ranks = world.size();
    description.device = job.device().str();
    description.libtorch = torch_version();
    description.parameters = models::parameter_count(options);
    description.flops_per_token = models::training_flops_per_token(options, options.context);
    description.peak_flops = peak_flops(world, job.device(), config.training.precision);
    description.partition = lines_of(models::describe_parts(job.model().parts(), options));
    description.tokens_per_step = job.tokens_per_step();
    description.training_tokens = data.training->dataset().tokens();
    description.validation_tokens = data.validation ? data.validation->dataset().tokens() : 0;
    description.first_step = job.steps_done();
    description.resumed_from = resumed_from;
  }

  void save() {
    const checkpoint::SaveStall stall = writer.save(job.steps_done(), job.contents());
    saved = job.steps_done();
    tell([&](Observer& each) { each.on_checkpoint(job.steps_done(), stall); });
  }

  void validate() {
    const auto begin = Clock::now();
    const double loss = job.validate();
    validated = job.steps_done();
    tell([&](Observer& each) { each.on_validation(job.steps_done(), loss, seconds_since(begin)); });
  }

  void trace() {
    const fs::path path = folder / "traces" / fmt::format("step-{:08}.json", job.steps_done());
    if (world.rank() == 0) fs::create_directories(path.parent_path());
    // Of one replica: the pipeline of the first rank.
    if (job.layout().dp() == 0 && job.layout().tp() == 0) job.pipeline().write_trace(path.string());
    tell([&](Observer& each) { each.on_trace(job.steps_done(), path); });
  }

  static bool is_due(std::int64_t step, std::int64_t every) { return every > 0 && step % every == 0; }

  StepExtras extras_of(const StepOutcome& outcome) {
    constexpr double kWeightOfLast = 0.2;  // of the pace that the estimate goes by
    pace = pace == 0 ? outcome.times.total : (1 - kWeightOfLast) * pace + kWeightOfLast * outcome.times.total;
    StepExtras extras;
    extras.tokens_per_second = static_cast<double>(outcome.tokens) / outcome.times.total;
    extras.seconds_left = pace * static_cast<double>(config.training.steps - outcome.step);
    extras.resident_bytes = resident_bytes();
    extras.device_bytes = peak_device_bytes(job.device());
    return extras;
  }

  RunEnd run() {
    try {
      return train();
    } catch (const NotFiniteError&) {
      writer.wait();  // all ranks stop alike: what is being saved is from before
      throw;
    }
  }

  RunEnd train() {
    const auto begin = Clock::now();
    tell([&](Observer& each) { each.on_start(description); });
    RunEnd end = RunEnd::Finished;
    if (job.steps_done() == 0 && data.validation && config.training.validate_every > 0) validate();
    while (job.steps_done() < config.training.steps) {
      const bool out_of_time = config.training.time_limit_s > 0 && seconds_since(begin) > config.training.time_limit_s;
      const StepOutcome outcome = job.train_step(stop_requested() || out_of_time);
      const StepExtras extras = extras_of(outcome);
      if (is_due(outcome.step, config.output.metrics_every) || outcome.step == config.training.steps) tell([&](Observer& each) { each.on_step(outcome, extras); });
      for (const std::int64_t step : config.output.trace_steps)
        if (step == outcome.step) trace();
      if (data.validation && is_due(outcome.step, config.training.validate_every)) validate();
      if (is_due(outcome.step, config.checkpoint.every)) save();
      if (outcome.stop) {
        end = stop_requested() ? RunEnd::Stopped : RunEnd::TimeLimit;
        break;
      }
    }
    if (data.validation && config.training.validate_every > 0 && validated != job.steps_done() && end == RunEnd::Finished) validate();
    if (saved != job.steps_done() && job.steps_done() > description.first_step) save();
    writer.wait();
    tell([&](Observer& each) { each.on_end(end, job.steps_done()); });
    return end;
  }

  comm::World world;
  TrainConfig config;
  fs::path folder;
  std::vector<Observer*> observers;
  TrainingData data;
  TrainingJob job;
  fs::path checkpoints;
  checkpoint::CheckpointWriter writer;
  RunDescription description;
  std::string resumed_from;
  std::int64_t saved = -1;
  std::int64_t validated = -1;
  double pace = 0;
};

Trainer::Trainer(const comm::World& world, const TrainConfig& config, fs::path folder, std::vector<Observer*> observers)
    : impl_(std::make_unique<Impl>(world, config, std::move(folder), std::move(observers))) {}
Trainer::~Trainer() = default;
RunEnd Trainer::run() { return impl_->run(); }
TrainingJob& Trainer::job() { return impl_->job; }
const RunDescription& Trainer::description() const { return impl_->description; }

}  // namespace penstock::train
