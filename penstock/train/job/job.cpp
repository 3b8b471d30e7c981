#include "penstock/train/job/job.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/cuda.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/env.h"
#include "penstock/base/log.h"
#include "penstock/checkpoint/tensors/load.h"
#include "penstock/checkpoint/tensors/tensor_part.h"
#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/comm/backend/backend.h"
#include "penstock/comm/transport/ucx_transport.h"
#include "penstock/errors.h"
#include "penstock/gradients.h"
#include "penstock/lr_schedule.h"
#include "penstock/mode.h"
#include "penstock/observer.h"
#include "penstock/optimizer.h"
#include "penstock/train/config/expert_overlap.h"
#include "penstock/train/data/prefetcher.h"
#include "penstock/train/job/find_not_finite.h"
#include "penstock/train/job/replica_gradient_sync.h"
#include "penstock/train/job/stage_graphs.h"
#include "penstock/train/job/step_inputs.h"
#include "penstock/train/job/step_sums.h"
#include "penstock/train/job/structure_metadata.h"
#include "penstock/train/report/elapsed.h"

namespace penstock::train {

namespace {

using Clock = std::chrono::steady_clock;

std::unique_ptr<optim::Optimizer> make_optimizer(const std::vector<optim::NamedParameter>& parameters,
                                                 const TrainingConfig& config) {
  if (config.optimizer == "sgd")
    return std::make_unique<optim::SGD>(optim::decay_groups(parameters),
                                        optim::SGDOptions{.lr = config.lr,
                                                          .momentum = config.momentum,
                                                          .nesterov = false,
                                                          .weight_decay = config.weight_decay,
                                                          .decoupled = false,
                                                          .kernels = optim::Kernels::Auto});
  return std::make_unique<optim::AdamW>(optim::decay_groups(parameters),
                                        optim::AdamWOptions{.lr = config.lr,
                                                            .beta1 = config.betas.at(0),
                                                            .beta2 = config.betas.at(1),
                                                            .eps = config.epsilon,
                                                            .weight_decay = config.weight_decay,
                                                            .kernels = optim::Kernels::Auto});
}

optim::LossScalerOptions scaler_options(const TrainingConfig& config) {
  optim::LossScalerOptions options;
  options.enabled = config.precision == "fp16";
  if (config.loss_scale > 0) {  // fixed scale
    options.initial_scale = options.min_scale = options.max_scale = config.loss_scale;
  }
  return options;
}

optim::LrSchedule lr_schedule(const TrainingConfig& config) {
  return {.peak = config.lr,
          .floor = config.lr * config.min_lr_ratio,
          .warmup_steps = config.warmup_steps,
          .total_steps = config.steps,
          .decay = optim::parse_decay(config.decay)};
}

std::int64_t count_targets(std::span<const std::int64_t> targets) {
  std::int64_t counted = 0;
  for (const std::int64_t target : targets) counted += target != kIgnored;
  return counted;
}

}  // namespace

namespace {

// Rejects a transport that cannot carry the device's tensors; it would be ignored and another one used.
void check_transport(const LayoutConfig& config, bool gpu) {
  const auto refuse = [&](const char* what, const char* remedy) {
    throw ConfigError(describe("layout.transport", fmt::format("{}, which {}", config.transport, what),
                               "a transport for layout.device", remedy));
  };
  if (config.transport == "nccl" && !gpu)
    refuse("supports CUDA tensors only, but the model runs on the CPU",
           "set layout.transport to auto, gloo or ucx");
  if (config.transport == "nccl" && !comm::nccl_available())
    refuse("this LibTorch was built without", "set layout.transport to auto, or layout.device to cpu");
  if ((config.transport == "gloo" || config.transport == "ucx") && gpu)
    refuse("supports CPU tensors only, but the model runs on GPUs", "set layout.transport to auto or nccl");
  if (config.transport == "ucx" && !comm::ucx_available())
    refuse("this build lacks", "set layout.transport to auto or gloo");
}

}  // namespace

at::Device configured_device(const LayoutConfig& config, const comm::World& world) {
  const int gpus = torch::cuda::is_available() ? static_cast<int>(torch::cuda::device_count()) : 0;
  // Several ranks on one GPU, at the price that everything between them goes through host memory.
  const bool shares = gpus > 0 && env_int("PENSTOCK_SHARE_GPUS", 0, 1) == 1 && config.device == "cuda";
  const bool own_gpu = shares || gpus >= world.local_size();
  const bool cpu = config.device == "cpu" || (config.device == "auto" && !own_gpu);
  if (cpu || own_gpu) check_transport(config, !cpu);
  if (cpu) return at::kCPU;
  if (!own_gpu)
    throw ConfigError(
        describe("layout.device",
                 fmt::format("cuda, with {} GPUs for {} ranks on this host", gpus, world.local_size()),
                 "one GPU per rank",
                 "start fewer ranks, set layout.device to cpu, or let ranks share GPUs with "
                 "PENSTOCK_SHARE_GPUS=1"));
  return at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(world.local_rank() % gpus));
}

struct TrainingJob::Impl {
  Impl(const comm::World& the_world, const TrainConfig& the_config, TrainingData the_data)
      : world(the_world),
        config(the_config),
        data(std::move(the_data)),
        layout(world, config.layout),
        device(configured_device(config.layout, world)),
        schedule(configured_schedule(config.layout)),
        model(layout, config, schedule, device, open_stage_graphs(layout, config, schedule, device)),
        sync(layout, model, reduces_early()),
        pipeline(model.stages(), schedule, loss(), pipeline_options()),
        optimizer(make_optimizer(model.parameters(), config.training)),
        scaler(scaler_options(config.training)),
        rates(lr_schedule(config.training)) {
    optim::check(rates);
    if (static_cast<std::int64_t>(data.training->dataset().vocabulary()) > config.model.vocabulary)
      throw ConfigError(
          describe("model.vocabulary", std::to_string(config.model.vocabulary),
                   fmt::format("at least the {} of the data", data.training->dataset().vocabulary()),
                   "raise it, or use other data"));
    if (config.layout.pp > 1) step_groups.push_back(layout.mesh().group("pp"));
    needs = structure_needs(config, model.own_parts());
    prefetch(0);
  }

  // Whether the gradients of a stage are complete when its last backward has run. Accumulated runs are
  // reduced once, by finish(); without the callback the pipeline adds them in one buffer (step_gradients.h).
  // Copies of a stage are summed at the end of a run.
  bool reduces_early() const {
    return config.training.accumulation == 1 && schedule.stages().chains().size() == 1;
  }

  std::int64_t positions_of_microbatch() const {
    return config.layout.microbatch_size * config.model.context;
  }
  std::int64_t samples_of_run() const {
    return config.layout.microbatches * config.layout.microbatch_size;
  }  // of one replica
  std::int64_t positions_of_step() const {
    return samples_of_run() * config.layout.dp * config.training.accumulation * config.model.context;
  }

  // A sum divided by a fixed number of positions, so that means over microbatches and replicas and sums over
  // runs add up to the whole.
  PipelineLoss loss() const {
    const double each = static_cast<double>(positions_of_microbatch() * config.training.accumulation);
    return PipelineLoss([this, each](const at::Tensor& output, const at::Tensor& targets) {
      return model.loss(output, targets, each);
    });
  }

  PipelineOptions pipeline_options() {
    PipelineOptions options{world};
    options.ranks = layout.pipeline_ranks();
    options.seed = static_cast<std::uint64_t>(config.training.seed);
    options.return_outputs = false;
    if (reduces_early()) options.gradients_done = [this](int stage) { sync.stage_done(stage); };
    options.rows = rows_of_microbatch(layout, config);
    if (config.layout.border_dtype == "bf16") options.borders.dtype = BorderDtype::BFloat16;
    if (config.layout.border_dtype == "fp8") options.borders.dtype = BorderDtype::Float8;
    // Activations between stages are whole and equal on all tensor-parallel ranks, unless each has its
    // tokens.
    if (layout.tp_size() > 1 && layout.pp_size() > 1 && !config.layout.sequence_parallel)
      options.borders.equal_ranks = layout.mesh().group("tp");
    options.overlap_exchanges = ExpertOverlap(config.layout, schedule).on();
    if (config.layout.transport == "gloo") options.p2p = comm::P2PTransport::Gloo;
    if (config.layout.transport == "ucx") options.p2p = comm::P2PTransport::Ucx;
    return options;
  }

  void prefetch(std::uint64_t position) {
    const std::int64_t round = samples_of_run() * config.layout.dp;
    batches = std::make_unique<Prefetcher>(
        [this](std::uint64_t first, Batch& filled) { fill_share(*data.training, first, filled); },
        PrefetchOptions{
            .first = position, .stride = static_cast<std::uint64_t>(round), .share = {0, round}, .depth = 4});
  }

  // This replica's samples of the round that begins at global sample `first`. The replicas share every
  // microbatch and take its rows in order, so that a row's index in the whole microbatch, which determines
  // dropout, does not depend on the number of replicas.
  void fill_share(const Sampler& sampler, std::uint64_t first, Batch& filled) const {
    const std::int64_t rows = config.layout.microbatch_size, context = config.model.context;
    filled.position = first;
    filled.samples = samples_of_run();
    filled.context = context;
    for (auto* values : {&filled.tokens, &filled.targets, &filled.documents})
      values->resize(static_cast<std::size_t>(filled.samples * context));
    if (needs.any()) filled.structure.resize(filled.tokens.size());
    for (std::int64_t sample = 0; sample < filled.samples; ++sample) {
      const std::int64_t global = (sample / rows * config.layout.dp + layout.dp()) * rows + sample % rows;
      const auto place = [&](std::vector<std::int64_t>& values) {
        return std::span(values).subspan(static_cast<std::size_t>(sample * context),
                                         static_cast<std::size_t>(context));
      };
      sampler.sample(first + static_cast<std::uint64_t>(global), place(filled.tokens), place(filled.targets),
                     place(filled.documents));
      if (needs.any())
        sampler.structure(
            first + static_cast<std::uint64_t>(global),
            std::span(filled.structure)
                .subspan(static_cast<std::size_t>(sample * context), static_cast<std::size_t>(context)));
    }
  }

  models::StageInputs inputs_of(const Batch& batch) const {
    return step_inputs(config, model.model(), needs, batch, device);
  }

  // What the sum of losses must be multiplied by to become a sum over tokens.
  double loss_divisor() const {
    return static_cast<double>(positions_of_microbatch() * config.training.accumulation);
  }

  // Targets of the microbatches whose losses this rank computes: those of the chains that end here.
  double count_own_targets(const Batch& of) const {
    const schedule::StageMap& map = schedule.stages();
    double counted = 0;
    for (const schedule::Chain& chain : map.chains())
      if (map.rank_of(chain.first_stage + chain.stages - 1) == layout.pp())
        counted += static_cast<double>(count_targets(
            std::span(of.targets)
                .subspan(static_cast<std::size_t>(chain.first_microbatch * positions_of_microbatch()),
                         static_cast<std::size_t>(chain.microbatches * positions_of_microbatch()))));
    return counted;
  }

  // Sums over the first rank of each tensor-parallel group; the other ranks have the same values.
  std::vector<double> sum_over_world(std::vector<double> numbers, std::size_t counted) const {
    if (layout.tp() != 0)
      std::fill(numbers.begin(), numbers.begin() + static_cast<std::ptrdiff_t>(counted), 0.0);
    if (world.size() == 1) return numbers;
    at::Tensor all = at::tensor(numbers, at::kDouble).to(device);
    world.group()
        .all_reduce(all, comm::ReduceOp::Sum, {.label = "numbers of the step", .timeout = {}})
        .wait();
    all = all.cpu();
    return {all.data_ptr<double>(), all.data_ptr<double>() + all.numel()};
  }

  StepOutcome train_step(bool stop) {
    const auto begin = Clock::now();
    StepOutcome outcome;
    outcome.lr = optim::lr_at(rates, steps_done);
    outcome.loss_scale = scaler.scale();
    outcome.tokens = positions_of_step();
    optimizer->set_lr(outcome.lr);
    optimizer->zero_grad();
    model.shared().clear_gradients();
    pipeline.set_loss_scale(scaler.scale());
    std::vector<at::Tensor> losses;
    double counted = 0, squared_error = 0, squared_values = 0;
    for (std::int64_t run = 0; run < config.training.accumulation; ++run) {
      auto now = Clock::now();
      batches->next(batch);
      const models::StageInputs inputs = inputs_of(batch);
      outcome.times.data += seconds_since(now);
      now = Clock::now();
      pipeline.set_step(steps_done * config.training.accumulation + run);
      const StepResult result = pipeline.step(inputs.args, inputs.keywords, inputs.target);
      losses.insert(losses.end(), result.losses.begin(), result.losses.end());
      counted += count_own_targets(batch);
      const BorderReport border = pipeline.report().border;
      squared_error += border.squared_error;
      squared_values += border.squared_values;
      outcome.times.schedule += seconds_since(now);
    }
    auto now = Clock::now();
    sync.finish();
    outcome.times.sync = seconds_since(now);
    now = Clock::now();
    const optim::ClipResult clipped = clip(outcome);  // started before anything waits for the device
    outcome.times.update = seconds_since(now);
    now = Clock::now();
    const StepSums sums = read_sums(losses, model.take_auxiliary_losses());
    outcome.times.schedule += seconds_since(now);  // a GPU finishes its work here
    now = Clock::now();
    std::vector<double> numbers{sums.loss * loss_divisor(), counted};
    numbers.insert(numbers.end(), sums.auxiliary.begin(), sums.auxiliary.end());
    const std::size_t summed = numbers.size();
    outcome.compiled = model.take_compiled();
    double first = 0, again = 0, loaded = 0;
    for (const CompiledForward& forward : outcome.compiled)
      ++(forward.source != "captured" ? loaded : forward.graph > 1 ? again : first);
    numbers.insert(numbers.end(), {stop ? 1.0 : 0.0, squared_error, squared_values, first, again, loaded});
    const std::vector<double> all = sum_over_world(std::move(numbers), summed);
    outcome.loss = all[1] > 0 ? all[0] / all[1] : 0;
    outcome.auxiliary = auxiliary_means(std::span(all).subspan(2, sums.auxiliary.size()));
    outcome.stop = all[summed] > 0;
    outcome.border_error = all[summed + 2] > 0 ? std::sqrt(all[summed + 1] / all[summed + 2]) : 0;
    outcome.first_captures = std::lround(all[summed + 3]);
    outcome.recaptures = std::lround(all[summed + 4]);
    outcome.loads = std::lround(all[summed + 5]);
    outcome.times.sync += seconds_since(now);
    now = Clock::now();
    update(outcome, clipped);
    model.after_step(!outcome.skipped);
    outcome.times.update += seconds_since(now);
    ++steps_done;
    outcome.step = steps_done;
    outcome.times.total = seconds_since(begin);
    return outcome;
  }

  // The replicas have parts of the same microbatches: each contributes its mean over its own rows.
  std::vector<LossTerm> auxiliary_means(std::span<const double> sums) const {
    const auto forwards =
        static_cast<double>(config.layout.microbatches * config.training.accumulation * config.layout.dp);
    const std::vector<models::AuxiliaryTerm>& terms = model.plan().auxiliary;
    std::vector<LossTerm> means;
    for (std::size_t i = 0; i < terms.size(); ++i)
      means.push_back({.name = terms[i].name, .value = sums[i] / forwards, .weight = terms[i].weight});
    return means;
  }

  // Computes the gradient norm and clips the gradients; does nothing in a step that fp16 skips. Otherwise
  // does not wait for the device.
  optim::ClipResult clip(StepOutcome& outcome) {
    if (scaler.enabled()) {
      outcome.skipped = !scaler.unscale(optimizer->parameters(), {.groups = step_groups, .device = device});
      scaler.update();
    }
    if (outcome.skipped) return {};
    if (gradient_hook) {
      optim::settle_gradients(optimizer->parameters());
      gradient_hook(optimizer->parameters());
    }
    const double limit =
        config.training.clip_norm > 0 ? config.training.clip_norm : std::numeric_limits<double>::infinity();
    return optim::clip_grad_norm(
        optimizer->parameters(), limit,
        {.order = 2,
         .groups = step_groups,
         .counts = [&](const optim::NamedParameter& each) { return model.counts(each); },
         .non_finite = optim::NonFinite::Leave,
         .device = device});
  }

  void update(StepOutcome& outcome, const optim::ClipResult& clipped) {
    if (outcome.skipped) return;
    outcome.grad_norm = clipped.value();
    if (!std::isfinite(outcome.loss) || !std::isfinite(outcome.grad_norm)) throw_not_finite(outcome);
    optimizer->step();
    ++updates_done;
    model.shared().share_values();
  }

  [[noreturn]] void throw_not_finite(const StepOutcome& outcome) {
    std::string began;
    try {
      const std::optional<NonFiniteOrigin> place = first_bad();
      began =
          place
              ? place->what
              : "the origin could not be determined: parameters, repeated forwards and gradients are finite";
    } catch (const std::exception& error) {
      began = fmt::format("the origin could not be determined, because the search failed: {}", error.what());
    }
    const auto shown = [](double value) {
      return std::isnan(value) ? std::string("nan") : fmt::format("{}", value);
    };  // without the sign of NaN
    throw NotFiniteError(fmt::format(
        "step {}: loss {}, gradient norm {}: {}; checkpoints are unchanged: resume from the last one with a "
        "lower training.lr, a longer training.warmup_steps or a smaller training.clip_norm",
        steps_done + 1, shown(outcome.loss), shown(outcome.grad_norm), began));
  }

  // What was bad before the step, else the first operator that produced it, else the first gradient. Dropout
  // differs in the repeated forwards, so that a problem caused by dropout alone may not be found.
  std::optional<NonFiniteOrigin> first_bad() {
    if (const auto place = earliest(world, bad_parameter(layout, model))) return place;
    OperatorWatch watch(layout, model);
    const std::int64_t runs = config.training.accumulation, round = samples_of_run() * config.layout.dp;
    Batch again;
    for (std::int64_t run = 0; run < runs; ++run) {
      fill_share(*data.training, batches->position() - static_cast<std::uint64_t>((runs - run) * round),
                 again);
      const models::StageInputs inputs = inputs_of(again);
      watch.begin_run(run, runs);
      const ModeGuard watching(watch);
      pipeline.eval(inputs.args, inputs.keywords, inputs.target);
    }
    if (const auto place = earliest(world, watch.found())) return place;
    return earliest(world, bad_gradient(layout, model));
  }

  double validate() {
    if (!data.validation)
      throw StateError("validation: there is no validation data; raise data.validation_fraction");
    model.set_training(false);
    std::vector<at::Tensor> losses;
    double counted = 0;
    const std::int64_t round = samples_of_run() * config.layout.dp;
    Batch held;
    for (std::int64_t i = 0; i < config.training.validate_batches; ++i) {
      fill_share(*data.validation, static_cast<std::uint64_t>(i * round), held);
      const models::StageInputs inputs = inputs_of(held);
      const StepResult result = pipeline.eval(inputs.args, inputs.keywords, inputs.target);
      losses.insert(losses.end(), result.losses.begin(), result.losses.end());
      counted += count_own_targets(held);
    }
    model.set_training(true);
    const std::vector<double> all = sum_over_world({read_sums(losses, {}).loss * loss_divisor(), counted}, 2);
    return all[1] > 0 ? all[0] / all[1] : 0;
  }

  std::vector<checkpoint::TensorPart> model_parts() const {
    std::vector<checkpoint::TensorPart> parts;
    for (const optim::NamedParameter& parameter : model.parameters())
      parts.push_back(checkpoint::tensor_part(parameter.name, parameter.tensor));
    for (const models::StateBuffer& buffer : model.state_buffers())
      parts.push_back(checkpoint::tensor_part(buffer.name, buffer.tensor));
    return parts;
  }

  // Includes parameters without a gradient so far: loading expects the state of all parameters.
  std::vector<checkpoint::TensorPart> optimizer_parts() const {
    optimizer->ensure_state();
    std::vector<checkpoint::TensorPart> parts;
    for (const optim::NamedTensor& entry : optimizer->state().tensors)
      parts.push_back(checkpoint::tensor_part(entry.name, entry.tensor));
    return parts;
  }

  // A parameter is updated if it has a gradient, usually in every update, so that one number
  // (optimizer_steps) serves all. The count of a parameter that was skipped is written with its state.
  std::vector<checkpoint::TensorPart> differing_steps() const {
    std::vector<checkpoint::TensorPart> parts;
    if (optimizer->state().tensors.empty()) return parts;  // SGD without momentum: the count has no effect
    for (const optim::NamedSteps& entry : optimizer->state().steps)
      if (entry.steps != updates_done)
        parts.push_back(checkpoint::tensor_part(entry.name, at::full({1}, entry.steps, at::kLong)));
    return parts;
  }

  std::vector<checkpoint::TensorPart> saved_optimizer_parts() const {
    std::vector<checkpoint::TensorPart> parts = optimizer_parts();
    for (checkpoint::TensorPart& part : differing_steps()) parts.push_back(std::move(part));
    return parts;
  }

  std::string state_json() const {
    const optim::LossScalerState scale = scaler.state();
    return nlohmann::json{{"step", steps_done},
                          {"optimizer_steps", updates_done},
                          {"data",
                           {{"position", batches->position()},
                            {"fingerprint", fmt::format("{:016x}", data.training->dataset().fingerprint())}}},
                          {"loss_scaler", {{"scale", scale.scale}, {"good_steps", scale.good_steps}}},
                          {"seed", config.training.seed}}
        .dump(1);
  }

  void load(const checkpoint::Checkpoint& checkpoint, ChangedDataPolicy other_data) {
    checkpoint::WorldAgreement agreement(world);
    checkpoint::load_into(agreement, checkpoint, checkpoint::Section::Model, model_parts());
    model.shared().share_values();
    std::vector<checkpoint::TensorPart> parts = optimizer_parts();
    const nlohmann::json state = nlohmann::json::parse(checkpoint.state_json());
    steps_done = state.at("step").get<std::int64_t>();
    updates_done = state.at("optimizer_steps").get<std::int64_t>();
    std::vector<optim::NamedSteps> counts = optimizer->state().steps;
    std::vector<std::pair<std::size_t, at::Tensor>> own_counts;  // of parameters that some updates skipped
    for (std::size_t i = 0; i < counts.size(); ++i) {
      counts[i].steps = updates_done;
      if (!checkpoint.tensors(checkpoint::Section::Optimizer).contains(counts[i].name)) continue;
      own_counts.emplace_back(i, at::zeros({1}, at::kLong));
      parts.push_back(checkpoint::tensor_part(counts[i].name, own_counts.back().second));
    }
    checkpoint::load_into(agreement, checkpoint, checkpoint::Section::Optimizer, parts);
    for (const auto& [i, count] : own_counts) counts[i].steps = count.item<std::int64_t>();
    optimizer->set_steps(counts);
    scaler.load_state({.scale = state.at("loss_scaler").at("scale").get<double>(),
                       .good_steps = state.at("loss_scaler").at("good_steps").get<std::int64_t>()});
    std::uint64_t position = state.at("data").at("position").get<std::uint64_t>();
    const std::string fingerprint = fmt::format("{:016x}", data.training->dataset().fingerprint());
    if (const auto former = state.at("data").at("fingerprint").get<std::string>(); former != fingerprint) {
      if (other_data == ChangedDataPolicy::Refuse)
        throw ConfigError(describe(
            "data of the run", fmt::format("tokens with the fingerprint {}", fingerprint),
            fmt::format("the fingerprint in its checkpoint {}: {}", checkpoint.path().string(), former),
            "restore the former data, or train on the new data in a new run: set another --run_folder, and "
            "--resume to the path of this checkpoint"));
      log().warn(
          "train: the data differ from those of checkpoint {}; training starts with their first sample",
          checkpoint.path().string());
      position = 0;
    }
    prefetch(position);
  }

  comm::World world;
  TrainConfig config;
  TrainingData data;
  RankLayout layout;
  at::Device device;
  schedule::Schedule schedule;
  ModelStages model;
  ReplicaGradientSync sync;
  PipelineRuntime pipeline;
  std::unique_ptr<optim::Optimizer> optimizer;
  optim::LossScaler scaler;
  optim::LrSchedule rates;
  std::vector<comm::Group> step_groups;
  GradientHook gradient_hook;
  StructureNeeds needs;  // of the stages of this rank
  std::int64_t steps_done = 0;
  std::int64_t updates_done = 0;  // optimizer steps: all except those skipped by fp16
  Batch batch;
  std::unique_ptr<Prefetcher> batches;
};

TrainingJob::TrainingJob(const comm::World& world, const TrainConfig& config, TrainingData data)
    : impl_(std::make_unique<Impl>(world, config, std::move(data))) {}
TrainingJob::~TrainingJob() = default;

StepOutcome TrainingJob::train_step(bool stop) { return impl_->train_step(stop); }
void TrainingJob::set_gradient_hook(GradientHook hook) { impl_->gradient_hook = std::move(hook); }
double TrainingJob::validate() { return impl_->validate(); }
std::int64_t TrainingJob::steps_done() const { return impl_->steps_done; }
std::uint64_t TrainingJob::position() const { return impl_->batches->position(); }
std::int64_t TrainingJob::tokens_per_step() const { return impl_->positions_of_step(); }
checkpoint::CheckpointContents TrainingJob::contents() const {
  return {impl_->model_parts(), impl_->saved_optimizer_parts(), impl_->state_json()};
}
void TrainingJob::load(const checkpoint::Checkpoint& checkpoint, ChangedDataPolicy other_data) {
  impl_->load(checkpoint, other_data);
}
HeldMemory TrainingJob::held_memory() const {
  return train::held_memory(impl_->model, *impl_->optimizer, impl_->sync);
}
const RankLayout& TrainingJob::layout() const { return impl_->layout; }
const ModelStages& TrainingJob::model() const { return impl_->model; }
PipelineRuntime& TrainingJob::pipeline() { return impl_->pipeline; }
at::Device TrainingJob::device() const { return impl_->device; }

}  // namespace penstock::train
