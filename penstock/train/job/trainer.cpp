#include "penstock/trainer.h"

#include <fmt/format.h>
#include <torch/cuda.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <optional>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "penstock/base/files.h"
#include "penstock/base/log.h"
#include "penstock/checkpoint/files/folder.h"
#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/checkpoint_types.h"
#include "penstock/errors.h"
#include "penstock/observer.h"
#include "penstock/torch/compat/device_memory.h"
#include "penstock/torch/compat/version.h"
#include "penstock/train/config/configured_schedule.h"
#include "penstock/train/config/expert_overlap.h"
#include "penstock/train/data/make_shards.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/open_data.h"
#include "penstock/train/job/peak_flops.h"
#include "penstock/train/job/process_memory.h"
#include "penstock/train/job/run_folder.h"
#include "penstock/train/job/trainer_access.h"
#include "penstock/train/report/elapsed.h"

namespace penstock::train {

namespace {

using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

std::atomic<bool> stop_flag{false};

constexpr std::chrono::seconds kPauseBeforeLastTry{2};

// Token shards made at the start of a run. Removed if the start is refused, so that the folder is unchanged.
class NewData {
 public:
  NewData(const comm::World& world, const TrainConfig& config, const fs::path& folder)
      : path_(folder / "data") {
    std::error_code error;
    is_new_ = world.rank() == 0 && config.data.shards.empty() && !fs::exists(path_, error) && !error;
  }
  NewData(const NewData&) = delete;
  NewData& operator=(const NewData&) = delete;
  ~NewData() {
    std::error_code error;
    if (is_new_) remove_tree(path_, error);
    if (error) log().warn("train: {} could not be removed: {}", path_.string(), error.message());
  }
  void keep() { is_new_ = false; }

 private:
  fs::path path_;
  bool is_new_ = false;
};

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
  Impl(const comm::World& the_world, const TrainConfig& the_config, fs::path the_folder,
       std::vector<Observer*> the_observers, const TrainerOptions& options,
       checkpoint::WriteFault write_fault = {})
      : world(the_world),
        config(the_config),
        folder(std::move(the_folder)),
        observers(world.rank() == 0 ? std::move(the_observers) : std::vector<Observer*>{}),
        new_data(world, config, folder),
        data(open_data(world, config, folder)),
        job(world, config, data),
        checkpoints(checkpoint_folder(config, folder)) {
    resume();
    checkpoint::WorldAgreement(world).agree("accept the start", [&] {
      if (world.rank() != 0) return;
      // Another run may write its checkpoints to the same folder: report that before anything changes.
      if (file_exists(checkpoints / checkpoint::FolderLock::kName)) checkpoint::FolderLock{checkpoints};
      if (options.accepted) options.accepted();
    });
    new_data.keep();
    writer = std::make_unique<checkpoint::CheckpointWriter>(
        world, checkpoints,
        checkpoint::WriterOptions{.files = {.max_file_bytes = std::uint64_t{5} << 30,
                                            .block_bytes = std::uint64_t{4} << 20,
                                            .keep_last = static_cast<int>(config.checkpoint.keep),
                                            .at_phase = {},
                                            .fault = std::move(write_fault)},
                                  .timeout = std::chrono::minutes(10)});
    describe_run();
  }

  template <class Call>
  void tell(Call call) {
    for (Observer* observer : observers) call(*observer);
  }

  void resume() {
    if (config.checkpoint.resume == "never") return;
    checkpoint::WorldAgreement agreement(world);
    const checkpoint::OpenPolicy policy{.verify = true, .allow_fallback = config.checkpoint.fallback};
    if (config.checkpoint.resume != "auto") {
      const checkpoint::Checkpoint opened =
          checkpoint::open_checkpoint(agreement, config.checkpoint.resume, policy);
      std::error_code error;
      const bool own = fs::equivalent(opened.path().parent_path(), checkpoints, error);
      job.load(opened, own ? ChangedDataPolicy::Refuse : ChangedDataPolicy::FromTheStart);
      resumed_from = opened.path().string();
    } else if (const auto opened = checkpoint::open_latest(agreement, checkpoints, policy)) {
      for (const std::string& skipped : opened->skipped)
        if (world.rank() == 0) log().warn("train: {}; using an older checkpoint", skipped);
      job.load(opened->checkpoint, ChangedDataPolicy::Refuse);
      resumed_from = opened->checkpoint.path().string();
    }
    if (!resumed_from.empty() && world.rank() == 0)
      log().info("train: continues after step {} from {}", job.steps_done(), resumed_from);
  }

  void describe_run() {
    const models::ModelPlan& plan = job.model().plan();
    if (world.rank() == 0) {
      for (const std::string& line : job.model().shared().report()) log().info("train: {}", line);
      const ExpertOverlap overlap(config.layout, configured_schedule(config.layout));
      if (!overlap.text().empty()) log().info("train: {}", overlap.text());
    }
    description.config = config;
    description.folder = folder;
    description.ranks = world.size();
    description.device = job.device().str();
    description.libtorch = torch_version();
    description.parameters = models::parameter_count(plan);
    description.flops_per_token = models::training_flops_per_token(plan);
    description.peak_flops = peak_flops(world, job.device(), config.training.precision);
    description.partition = lines_of(models::describe_parts(job.model().parts(), plan));
    description.tokens_per_step = job.tokens_per_step();
    description.training_tokens = data.training->dataset().tokens();
    description.validation_tokens = data.validation ? data.validation->dataset().tokens() : 0;
    description.first_step = job.steps_done();
    // A relative path stays valid if the run is moved with its checkpoints.
    const fs::path within = fs::path(resumed_from).lexically_relative(folder);
    description.resumed_from =
        within.empty() || *within.begin() == ".." ? resumed_from : within.generic_string();
  }

  // [collective] Starts a save after the previous one has finished.
  void save() {
    settle();
    const std::int64_t step = job.steps_done();
    try {
      stall = writer->save(step, job.contents());
      saving = step;
    } catch (const checkpoint::CheckpointError& error) {  // from planning; the same on every rank
      failed(step, error.what());
    }
  }

  // [collective] Waits for the save in progress. A failure on one rank is a failure on all: whether a
  // checkpoint counts is the same on all ranks.
  void settle() {
    if (!saving) return;
    const std::int64_t step = *saving;
    try {
      checkpoint::WorldAgreement(world).agree(fmt::format("checkpoint of step {}", step),
                                              [&] { writer->wait(); });
      saved = step;
    } catch (const checkpoint::CheckpointError&) {
      // announce() reports it with its reason.
    }
    announce();
    saving.reset();
  }

  // Reports saves that have finished since the last call. No communication.
  void announce() {
    for (const checkpoint::SaveOutcome& outcome : writer->ended()) {
      if (!outcome.error.empty())
        failed(outcome.step, outcome.error);
      else
        tell([&](Observer& each) { each.on_checkpoint(outcome.step, stall); });
    }
  }

  void failed(std::int64_t step, const std::string& error) {
    if (world.rank() != 0) return;
    const bool older = !resumed_from.empty() || !checkpoint::find_checkpoints(checkpoints).empty();
    gives_up = config.checkpoint.on_failure == "stop" || (config.checkpoint.on_failure == "auto" && !older);
    const char* next =
        job.steps_done() >= config.training.steps ? "the run ends without it unless a retry succeeds"
        : !gives_up ? "training continues and retries at the next checkpoint and at the end"
        : older     ? "the run ends (checkpoint.on_failure)"
                    : "there is no older checkpoint: the run ends unless the next attempt succeeds";
    log().error("train: {}; {}", error, next);
    tell([&](Observer& each) { each.on_checkpoint_failed(step, error); });
  }

  // [collective] Returns whether any rank was asked to end.
  bool was_asked_to_end(bool here) const {
    const checkpoint::Bytes verdict = checkpoint::WorldAgreement(world).agree(
        "whether the run was asked to end",
        [&] { return checkpoint::Bytes{static_cast<std::uint8_t>(here)}; },
        [](const std::vector<checkpoint::Bytes>& answers) {
          const bool any = std::any_of(answers.begin(), answers.end(),
                                       [](const checkpoint::Bytes& each) { return each.at(0) != 0; });
          return checkpoint::Bytes{static_cast<std::uint8_t>(any)};
        });
    return verdict.at(0) != 0;
  }

  // [collective] Writes the current state to disk. Returns false on failure. Retries once after a pause,
  // because a disk may be full only temporarily.
  bool save_last() {
    settle();
    for (int attempt = 0;
         attempt < 2 && saved != job.steps_done() && job.steps_done() > description.first_step; ++attempt) {
      if (attempt > 0) std::this_thread::sleep_for(kPauseBeforeLastTry);
      save();
      settle();
    }
    return saved == job.steps_done() || job.steps_done() == description.first_step;
  }

  void validate() {
    const auto begin = Clock::now();
    const double loss = job.validate();
    validated = job.steps_done();
    tell([&](Observer& each) { each.on_validation(job.steps_done(), loss, seconds_since(begin)); });
  }

  void trace() {
    const fs::path path = folder / "traces" / fmt::format("step-{:08}.json", job.steps_done());
    std::error_code missing;  // the attempt to write reports errors
    if (world.rank() == 0) fs::create_directories(path.parent_path(), missing);
    // Only one replica: the pipeline of the first rank, which writes the file after the others have
    // contributed. Failing to write a timeline must not end a run.
    try {
      if (job.layout().dp() == 0 && job.layout().tp() == 0) job.pipeline().write_trace(path.string());
    } catch (const ConfigError& error) {
      std::error_code ignored;  // a partial file is useless
      fs::remove(path, ignored);
      log().warn("train: the timeline of step {} could not be written: {}", job.steps_done(), error.what());
      return;
    }
    tell([&](Observer& each) { each.on_trace(job.steps_done(), path); });
  }

  static bool is_due(std::int64_t step, std::int64_t every) { return every > 0 && step % every == 0; }

  StepExtras extras_of(const StepOutcome& outcome) {
    constexpr double kWeightOfLast = 0.2;  // in the moving average of the pace
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
      settle();  // all ranks stop here; the save in progress has an earlier state
      throw;
    }
  }

  RunEnd train() {
    const auto begin = Clock::now();
    tell([&](Observer& each) { each.on_start(description); });
    RunEnd end = RunEnd::Finished;
    if (job.steps_done() == 0 && data.validation && config.training.validate_every > 0) validate();
    while (job.steps_done() < config.training.steps) {
      const bool out_of_time =
          config.training.time_limit_s > 0 && seconds_since(begin) > config.training.time_limit_s;
      const StepOutcome outcome = job.train_step(stop_requested() || out_of_time || gives_up);
      announce();
      const StepExtras extras = extras_of(outcome);
      const bool compiled = outcome.first_captures + outcome.recaptures + outcome.loads > 0;
      if (compiled || is_due(outcome.step, config.output.metrics_every) ||
          outcome.step == config.training.steps)
        tell([&](Observer& each) { each.on_step(outcome, extras); });
      for (const std::int64_t step : config.output.trace_steps)
        if (step == outcome.step) trace();
      if (data.validation && is_due(outcome.step, config.training.validate_every)) validate();
      if (is_due(outcome.step, config.checkpoint.every)) save();
      if (outcome.stop) {
        // No rank was asked to end: a checkpoint failed. If it can be written now, training continues.
        if (!was_asked_to_end(stop_requested() || out_of_time) && config.checkpoint.on_failure == "auto") {
          if (save_last()) {
            gives_up = false;
            continue;
          }
          end = RunEnd::NotSaved;
          break;
        }
        end = stop_requested() || !out_of_time ? RunEnd::Stopped : RunEnd::TimeLimit;
        break;
      }
    }
    if (data.validation && config.training.validate_every > 0 && validated != job.steps_done() &&
        end == RunEnd::Finished)
      validate();
    if (end != RunEnd::NotSaved && !save_last()) end = RunEnd::NotSaved;
    tell([&](Observer& each) { each.on_end(end, job.steps_done()); });
    return end;
  }

  comm::World world;
  TrainConfig config;
  fs::path folder;
  std::vector<Observer*> observers;
  NewData new_data;
  TrainingData data;
  TrainingJob job;
  fs::path checkpoints;
  std::unique_ptr<checkpoint::CheckpointWriter> writer;
  RunDescription description;
  std::string resumed_from;
  std::int64_t saved = -1;             // newest step saved since the start, the same on all ranks
  std::optional<std::int64_t> saving;  // step being saved
  checkpoint::SaveStall stall;         // of the save in progress
  bool gives_up = false;               // rank 0: a checkpoint could not be written and the run must end
  std::int64_t validated = -1;
  double pace = 0;
};

Trainer::Trainer(const comm::World& world, const TrainConfig& config, fs::path folder,
                 std::vector<Observer*> observers, TrainerOptions options)
    : impl_(std::make_unique<Impl>(world, config, std::move(folder), std::move(observers), options)) {}
Trainer::Trainer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Trainer::~Trainer() = default;
RunEnd Trainer::run() { return impl_->run(); }
const RunDescription& Trainer::description() const { return impl_->description; }

Trainer TrainerAccess::with_write_fault(const comm::World& world, const TrainConfig& config, fs::path folder,
                                        std::vector<Observer*> observers, checkpoint::WriteFault fault) {
  return Trainer(std::make_unique<Trainer::Impl>(world, config, std::move(folder), std::move(observers),
                                                 TrainerOptions{}, std::move(fault)));
}
TrainingJob& TrainerAccess::job(Trainer& trainer) { return trainer.impl_->job; }

}  // namespace penstock::train
