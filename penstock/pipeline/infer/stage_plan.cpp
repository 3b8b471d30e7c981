#include "penstock/pipeline/infer/stage_plan.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>

#include "penstock/base/describe.h"
#include "penstock/base/exception_text.h"
#include "penstock/base/hash.h"
#include "penstock/base/log.h"
#include "penstock/comm/message/message.h"
#include "penstock/errors.h"
#include "penstock/pipeline/contract/record_checks.h"
#include "penstock/pipeline/contract/record_messages.h"
#include "penstock/pipeline/infer/plan_key.h"
#include "penstock/pipeline/infer/stage_trial.h"
#include "penstock/pipeline/stage/stage_state.h"
#include "penstock/torch/tree/dense_layout.h"

namespace penstock {

namespace {

constexpr comm::MessageKind kForwardKind{"PFWD"};
constexpr comm::MessageKind kBackwardKind{"PBWD"};
constexpr std::uint16_t kVersion = 2;
constexpr std::int64_t kRowVersion = 2;
constexpr std::size_t kRefusedField = 5;  // index in a row
constexpr std::size_t kValidatesField = 6;
constexpr std::size_t kRefusalBytes = 2048;  // maximum length of the text that other ranks see
constexpr std::size_t kMostSteps = 4096;
constexpr std::size_t kMostPlans = 16384;

// What one stage tells another about the tensors it will send.
struct ForwardMessage {
  static constexpr bool kBackward = false;
  bool is_static = false;  // the examples apply to this microbatch
  bool varies = false;     // shapes may change each time
  TensorMetas metas;
};
struct BackwardMessage {
  static constexpr bool kBackward = true;
  OptionalTensorMetas metas;
};

std::vector<std::uint8_t> to_bytes(const ForwardMessage& message) {
  comm::MessageWriter writer(kForwardKind, kVersion);
  writer.write(message.is_static).write(message.varies).write(StageForwardMeta(message.metas));
  return writer.finish();
}
std::vector<std::uint8_t> to_bytes(const BackwardMessage& message) {
  comm::MessageWriter writer(kBackwardKind, kVersion);
  writer.write(StageBackwardMeta(message.metas));
  return writer.finish();
}
void from_bytes(const std::vector<std::uint8_t>& bytes, ForwardMessage& message) {
  comm::MessageReader reader(bytes, kForwardKind, {kVersion, kVersion});
  reader.read(message.is_static).read(message.varies);
  message.metas = reader.read<StageForwardMeta>().outputs();
  reader.expect_end();
}
void from_bytes(const std::vector<std::uint8_t>& bytes, BackwardMessage& message) {
  comm::MessageReader reader(bytes, kBackwardKind, {kVersion, kVersion});
  message.metas = reader.read<StageBackwardMeta>().input_grads();
  reader.expect_end();
}

// If no example requires grad, the caller did not specify it: floating-point examples then represent tensors
// that need gradients.
TensorMetas with_default_grads(TensorMetas metas, bool has_backward) {
  if (!has_backward ||
      std::any_of(metas.begin(), metas.end(), [](const TensorMeta& meta) { return requires_grad(meta); }))
    return metas;
  for (TensorMeta& meta : metas) {
    if (!at::isFloatingType(local_record(meta).dtype()) && !at::isComplexType(local_record(meta).dtype()))
      continue;
    meta = std::visit([](const auto& record) -> TensorMeta { return record.with_requires_grad(true); }, meta);
  }
  return metas;
}

// Returns what arrives on another rank: dense, in the order of the sender's strides.
TensorMetas as_sent(TensorMetas metas) {
  for (TensorMeta& meta : metas) meta = dense_meta(meta);
  return metas;
}
OptionalTensorMetas as_sent(OptionalTensorMetas metas) {
  for (auto& meta : metas)
    if (meta) meta = dense_meta(*meta);
  return metas;
}

TensorMetas comparable(TensorMetas metas) {
  for (TensorMeta& meta : metas) meta = comparable_meta(meta);
  return metas;
}
OptionalTensorMetas comparable(OptionalTensorMetas metas) {
  for (auto& meta : metas)
    if (meta) meta = comparable_meta(*meta);
  return metas;
}

// Autograd produces the gradient of a leaf in the layout of the leaf if that is dense, and contiguous
// otherwise. Gradients of distributed tensors are left unchanged.
OptionalTensorMetas in_layout_of(const TensorMetas& tensors, OptionalTensorMetas gradients) {
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i] || is_distributed(*gradients[i]) || is_distributed(tensors[i])) continue;
    const TensorRecord& gradient = local_record(*gradients[i]);
    const TensorRecord& like = local_record(tensors[i]);
    gradients[i] = like.shape() == gradient.shape() && is_dense(like.shape(), like.stride())
                       ? TensorRecord(gradient.shape(), like.stride(), gradient.dtype())
                       : TensorRecord::contiguous(gradient.shape(), gradient.dtype());
  }
  return gradients;
}

// Packs a text into a row of `count` numbers, for exchanges of rows; unpack_text reverses it.
std::vector<std::int64_t> pack_text(std::string text, std::size_t count) {
  text.resize(count * sizeof(std::int64_t), '\0');
  std::vector<std::int64_t> row(count);
  std::memcpy(row.data(), text.data(), text.size());
  return row;
}
std::string unpack_text(const std::vector<std::int64_t>& row) {
  std::string text(row.size() * sizeof(std::int64_t), '\0');
  std::memcpy(text.data(), row.data(), text.size());
  return text.substr(0, text.find('\0'));
}

}  // namespace

// One negotiation about one microbatch: the stages of this rank tell their neighbours, on this or other
// ranks, what they will send. Forward in ascending, backward in descending order of stages, so that a
// receiver always waits for a stage that does not wait for it.
struct StagePlanner::Negotiation {
  Negotiation(StagePlanner& owner, const StepDescription& description, std::size_t which)
      : planner(owner), step(description), microbatch(which) {}
  // Trials restore the state from when they began, so they must end in reverse order.
  ~Negotiation() {
    while (!trials.empty()) trials.erase(std::prev(trials.end()));
  }

  StagePlanner& planner;
  const StepDescription& step;
  const std::size_t microbatch;
  std::shared_ptr<MicrobatchPlan> plans = std::make_shared<MicrobatchPlan>();
  std::map<int, std::unique_ptr<StageTrial>> trials;
  std::map<int, std::vector<std::uint8_t>> local_messages;  // messages between stages of this rank, by tag
  std::vector<comm::Work> sends;

  // ---- messages ----

  // Channel 0: neighbours; 1 + k: skip k. Each message takes two tags, one for its size.
  int tag(int channel, int from, bool backward) const {
    return ((1 + channel) * planner.map_.stages() + from) * 4 + (backward ? 2 : 0);
  }
  int rank_of(int stage) const { return planner.map_.rank_of(stage); }
  bool stays_here(int to) const { return rank_of(to) == planner.own_; }
  int global_rank_of(int stage) const { return planner.ranks_[static_cast<std::size_t>(rank_of(stage))]; }

  void send_bytes(const std::vector<std::uint8_t>& bytes, int to_stage, int tag) {
    at::Tensor size = at::empty({1}, at::kLong);
    *size.data_ptr<std::int64_t>() = static_cast<std::int64_t>(bytes.size());
    at::Tensor payload = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
    std::memcpy(payload.data_ptr(), bytes.data(), bytes.size());
    sends.push_back(planner.control_.isend(
        size, global_rank_of(to_stage), {.tag = tag, .label = "size of a stage's records", .timeout = {}}));
    sends.push_back(planner.control_.isend(payload, global_rank_of(to_stage),
                                           {.tag = tag + 1, .label = "records of a stage", .timeout = {}}));
  }
  std::vector<std::uint8_t> receive_bytes(int from_stage, int tag) const {
    at::Tensor size = at::empty({1}, at::kLong);
    planner.control_.recv(size, global_rank_of(from_stage),
                          {.tag = tag, .label = "size of a stage's records", .timeout = {}});
    const std::int64_t count = *size.data_ptr<std::int64_t>();
    if (count < 0 || count > static_cast<std::int64_t>(comm::kDefaultMaxMessageBytes))
      throw PipeliningMetadataError(describe(
          "records of stage " + std::to_string(from_stage), fmt::format("{} bytes", count),
          fmt::format("at most {}", comm::kDefaultMaxMessageBytes), "run the same build on all ranks"));
    at::Tensor payload = at::empty({count}, at::kByte);
    planner.control_.recv(payload, global_rank_of(from_stage),
                          {.tag = tag + 1, .label = "records of a stage", .timeout = {}});
    const auto* data = payload.data_ptr<std::uint8_t>();
    return {data, data + count};
  }

  template <class Message>
  void send(int channel, int from, int to, const Message& message) {
    const int where = tag(channel, from, Message::kBackward);
    if (stays_here(to)) {
      local_messages[where] = to_bytes(message);
    } else {
      send_bytes(to_bytes(message), to, where);
    }
  }
  template <class Message>
  Message receive(int channel, int from) {
    const int where = tag(channel, from, Message::kBackward);
    Message message;
    from_bytes(rank_of(from) == planner.own_ ? local_messages.at(where) : receive_bytes(from, where),
               message);
    return message;
  }

  // ---- stages ----

  template <class Visit>
  void skips_into(int stage, const Visit& visit) const {
    for (std::size_t k = 0; k < planner.skips_.size(); ++k)
      if (planner.skips_[k].to == stage) visit(static_cast<int>(k) + 1, planner.skips_[k]);
  }
  template <class Visit>
  void skips_from(int stage, const Visit& visit) const {
    for (std::size_t k = 0; k < planner.skips_.size(); ++k)
      if (planner.skips_[k].from == stage) visit(static_cast<int>(k) + 1, planner.skips_[k]);
  }
  bool is_first(int stage) const { return planner.map_.is_first(stage); }
  bool is_last(int stage) const { return planner.map_.is_last(stage); }

  void forward(const PipelineStage& stage);
  bool take_inputs(const PipelineStage& stage, StagePlan& plan);
  void find_outputs(const PipelineStage& stage, StagePlan& plan, bool is_static);
  void announce_outputs(int stage, StagePlan& plan, bool is_static);

  void backward(const PipelineStage& stage);
  void take_output_grads(const PipelineStage& stage, StagePlan& plan);
  OptionalTensorMetas find_input_grads(const PipelineStage& stage, const StagePlan& plan);
};

void StagePlanner::Negotiation::forward(const PipelineStage& stage) {
  StagePlan& plan = (*plans)[stage.index()];
  const bool is_static = take_inputs(stage, plan);
  find_outputs(stage, plan, is_static);
  announce_outputs(stage.index(), plan, is_static);
}

// Returns whether the examples apply to this microbatch: the first stage decides, and each stage passes it
// on.
bool StagePlanner::Negotiation::take_inputs(const PipelineStage& stage, StagePlan& plan) {
  const int s = stage.index();
  bool is_static = planner.static_;
  if (is_first(s)) {
    plan.meta.inputs = metas_of(tensors_of(step.args[microbatch]));
    is_static =
        is_static &&
        check_metas("", *state_of(stage).examples.inputs, *plan.meta.inputs, OnMismatch::Collect).empty();
  } else {
    ForwardMessage message = receive<ForwardMessage>(0, s - 1);
    is_static = message.is_static;
    plan.meta.inputs = std::move(message.metas);
    plan.varying_inputs.assign(plan.meta.inputs->size(), message.varies);
  }
  plan.checked = planner.checked_;
  plan.main_inputs = plan.meta.inputs->size();
  plan.varying_inputs.resize(plan.main_inputs, false);
  skips_into(s, [&](int channel, const SkipTensor& skip) {
    const ForwardMessage message = receive<ForwardMessage>(channel, skip.from);
    plan.meta.inputs->insert(plan.meta.inputs->end(), message.metas.begin(), message.metas.end());
    plan.varying_inputs.resize(plan.meta.inputs->size(), message.varies);
  });
  return is_static;
}

void StagePlanner::Negotiation::find_outputs(const PipelineStage& stage, StagePlan& plan, bool is_static) {
  const int s = stage.index();
  const StageMeta& examples = state_of(stage).examples;
  bool varies =
      stage.options().announce_shapes ||
      std::find(plan.varying_inputs.begin(), plan.varying_inputs.end(), true) != plan.varying_inputs.end();
  if (is_static) {
    if (!is_first(s))
      check_metas(fmt::format("example inputs of stage {} and what stage {} sends", s, s - 1),
                  comparable(*examples.inputs), comparable(*plan.meta.inputs));
    plan.meta.outputs = with_default_grads(*examples.outputs, step.has_backward);
  } else {
    auto trial = std::make_unique<StageTrial>(
        stage, StageTrial::Kind{.has_backward = step.has_backward, .ends = is_last(s)});
    ++planner.trials_;
    if (is_first(s)) {
      trial->forward(step.args[microbatch], step.kwargs[microbatch]);
    } else {
      trial->forward(*plan.meta.inputs, step.kwargs[microbatch]);
    }
    plan.meta.outputs = trial->outputs();
    varies = varies || trial->data_dependent();
    if (examples.outputs && !is_last(s))
      check_metas(fmt::format("example outputs of stage {}", s), comparable(*examples.outputs),
                  comparable(*plan.meta.outputs), OnMismatch::Warn);
    if (examples.inputs && !is_first(s))
      check_metas(fmt::format("example inputs of stage {}", s), comparable(*examples.inputs),
                  comparable(*plan.meta.inputs), OnMismatch::Warn);
    if (!step.has_backward || is_first(s)) trial->end();
    trials[s] = std::move(trial);
  }
  plan.varying_outputs.assign(plan.meta.outputs->size(), varies);
}

void StagePlanner::Negotiation::announce_outputs(int s, StagePlan& plan, bool is_static) {
  std::size_t skipped = 0;
  skips_from(s, [&](int, const SkipTensor&) { ++skipped; });
  const std::size_t made = plan.meta.outputs->size();
  const std::size_t least = skipped + (is_last(s) ? 0 : 1);  // the last stage may return nothing
  if (made < least)
    throw PipeliningMetadataError(
        describe(fmt::format("outputs of stage {}", s), fmt::format("{} tensors", made),
                 fmt::format("at least {}: its own outputs, then {} for skip connections", least, skipped),
                 "return the tensors of skip connections last, in the order of their declaration"));
  plan.main_outputs = made - skipped;
  if (is_last(s)) return;
  const bool varies = plan.varying_outputs.front();
  const TensorMetas& all = *plan.meta.outputs;
  const auto announce = [&](int channel, int to, TensorMetas metas) {
    send(channel, s, to,
         ForwardMessage{is_static, varies, stays_here(to) ? std::move(metas) : as_sent(std::move(metas))});
  };
  std::size_t next = plan.main_outputs;
  skips_from(s, [&](int channel, const SkipTensor& skip) { announce(channel, skip.to, {all[next++]}); });
  announce(0, s + 1, {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(plan.main_outputs)});
}

void StagePlanner::Negotiation::backward(const PipelineStage& stage) {
  const int s = stage.index();
  StagePlan& plan = plans->at(s);
  if (!is_last(s)) take_output_grads(stage, plan);
  if (is_first(s)) {
    plan.meta.input_grads = OptionalTensorMetas(plan.meta.inputs->size());
    return;
  }
  plan.meta.input_grads = find_input_grads(stage, plan);
  const OptionalTensorMetas& all = *plan.meta.input_grads;
  const auto announce = [&](int channel, int to, OptionalTensorMetas metas) {
    send(channel, s, to, BackwardMessage{stays_here(to) ? std::move(metas) : as_sent(std::move(metas))});
  };
  std::size_t next = plan.main_inputs;
  skips_into(s, [&](int channel, const SkipTensor& skip) { announce(channel, skip.from, {all[next++]}); });
  announce(0, s - 1, {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(plan.main_inputs)});
}

void StagePlanner::Negotiation::take_output_grads(const PipelineStage& stage, StagePlan& plan) {
  const int s = stage.index();
  plan.meta.output_grads = receive<BackwardMessage>(0, s + 1).metas;
  skips_from(s, [&](int channel, const SkipTensor& skip) {
    const BackwardMessage message = receive<BackwardMessage>(channel, skip.to);
    plan.meta.output_grads->insert(plan.meta.output_grads->end(), message.metas.begin(), message.metas.end());
  });
  if (plan.meta.output_grads->size() != plan.meta.outputs->size())
    throw PipeliningMetadataError(describe(fmt::format("gradients sent back to stage {}", s),
                                           fmt::format("{}", plan.meta.output_grads->size()),
                                           fmt::format("{}, one for each output", plan.meta.outputs->size()),
                                           "make the next stage take every output"));
  // Without a trial run the examples are binding.
  if (const auto& examples = state_of(stage).examples.output_grads)
    check_metas(fmt::format("example gradients of the outputs of stage {} and what is sent back to it", s),
                comparable(*examples), comparable(*plan.meta.output_grads),
                trials.contains(s) ? OnMismatch::Warn : OnMismatch::Raise);
}

OptionalTensorMetas StagePlanner::Negotiation::find_input_grads(const PipelineStage& stage,
                                                                const StagePlan& plan) {
  const int s = stage.index();
  const StageMeta& examples = state_of(stage).examples;
  const auto at = trials.find(s);
  if (at == trials.end())
    return examples.input_grads ? as_sent(*examples.input_grads)
                                : in_layout_of(*plan.meta.inputs, derive_gradient_metas(*plan.meta.inputs));
  StageTrial& trial = *at->second;
  OptionalTensorMetas found;
  try {
    is_last(s) ? trial.backward_of_loss(planner.loss_, step.targets[microbatch])
               : trial.backward(*plan.meta.output_grads);
    found = trial.input_grads();
  } catch (const PipeliningMetadataError&) {
    throw;
  } catch (...) {
    const std::string why = current_exception_text();
    // A loss that reads values cannot be run on fake tensors; gradients of plain tensors have the records of
    // their tensors.
    if (!is_last(s) || plan.meta.has_distributed())
      std::throw_with_nested(
          StageBackwardError(fmt::format("stage {} failed in its trial backward: {}", s, why)));
    log().debug("pipeline: the loss of stage {} cannot run on fake tensors: {}", s, why);
    found = derive_gradient_metas(*plan.meta.inputs);
  }
  found = in_layout_of(*plan.meta.inputs, std::move(found));
  if (examples.input_grads)
    check_metas(fmt::format("example gradients of the inputs of stage {}", s),
                comparable(*examples.input_grads), comparable(found), OnMismatch::Warn);
  return found;
}

StagePlanner::StagePlanner(std::vector<PipelineStage> stages, schedule::StageMap map,
                           std::vector<SkipTensor> skips, PipelineLoss loss, comm::Group control,
                           std::vector<int> ranks, int own)
    : stages_(std::move(stages)),
      map_(std::move(map)),
      skips_(std::move(skips)),
      loss_(std::move(loss)),
      control_(std::move(control)),
      ranks_(std::move(ranks)),
      own_(own),
      validates_(std::any_of(stages_.begin(), stages_.end(),
                             [](const PipelineStage& stage) { return validates(stage); })) {}

std::uint64_t StagePlanner::hash_of(const StepDescription& step, std::size_t microbatch) const {
  HashBuilder hash;
  hash.add(step.has_backward);
  for (const PipelineStage& stage : stages_) {
    if (!map_.runs(stage.index(), static_cast<int>(microbatch))) continue;
    hash.add(stage.index());
    if (map_.is_first(stage.index())) add_arguments(hash, step.args[microbatch]);
    add_arguments(hash, step.kwargs[microbatch]);
    if (map_.is_last(stage.index()) && step.has_backward) add_arguments(hash, step.targets[microbatch]);
  }
  return hash.value();
}

std::vector<std::vector<std::int64_t>> StagePlanner::gather(const std::vector<std::int64_t>& row) {
  const auto width = static_cast<std::int64_t>(row.size());
  const auto count = static_cast<std::int64_t>(ranks_.size());
  if (count == 1) return {row};
  at::Tensor mine = at::empty({width}, at::kLong);
  std::memcpy(mine.data_ptr(), row.data(), row.size() * sizeof(std::int64_t));
  at::Tensor all = at::empty({count, width}, at::kLong);
  control_.all_gather(all, mine, {.label = "agreement on the step", .timeout = {}}).wait();
  std::vector<std::vector<std::int64_t>> rows;
  const auto* data = all.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < count; ++i) rows.emplace_back(data + i * width, data + (i + 1) * width);
  return rows;
}

void StagePlanner::refuse(const std::vector<std::vector<std::int64_t>>& rows, const std::exception_ptr& own) {
  std::string text;
  if (own) {
    try {
      std::rethrow_exception(own);
    } catch (...) {
      text = current_exception_text();
    }
  }
  const auto texts =
      gather(pack_text(text.substr(0, kRefusalBytes - 1), kRefusalBytes / sizeof(std::int64_t)));
  if (own) throw StepRefusal{own};
  std::string quoted;
  for (std::size_t rank = 0; rank < rows.size(); ++rank)
    if (rows[rank][kRefusedField] != 0)
      quoted += fmt::format("{}rank {} refused it: {}", quoted.empty() ? "" : "; ", ranks_[rank],
                            unpack_text(texts[rank]));
  throw StepRefusal{
      std::make_exception_ptr(ValueError(fmt::format("a step of the pipeline did not begin: {}", quoted)))};
}

std::vector<std::shared_ptr<const MicrobatchPlan>> StagePlanner::agree(const StepDescription& step) {
  std::vector<std::int64_t> hashes;
  HashBuilder whole;
  std::exception_ptr refusal = step.refusal;
  try {
    const std::uint64_t state = state_key(stages_);
    for (std::size_t m = 0; m < step.microbatches() && !refusal; ++m) {
      hashes.push_back(static_cast<std::int64_t>(HashBuilder().add(state).add(hash_of(step, m)).value()));
      whole.add(hashes.back());
    }
  } catch (...) {
    refusal = std::current_exception();  // for example an argument that has no record
  }
  const bool vote = std::none_of(stages_.begin(), stages_.end(), [&](const PipelineStage& stage) {
    return needs_trial(stage, step.has_backward);
  });
  const auto rows =
      gather({kRowVersion, step.has_backward ? 1 : 0, static_cast<std::int64_t>(step.microbatches()),
              vote ? 1 : 0, static_cast<std::int64_t>(whole.value()), refusal ? 1 : 0, validates_ ? 1 : 0});
  if (std::any_of(rows.begin(), rows.end(), [](const auto& row) { return row[kRefusedField] != 0; }))
    refuse(rows, refusal);
  checked_ = std::any_of(rows.begin(), rows.end(), [](const auto& row) { return row[kValidatesField] != 0; });

  static constexpr const char* kNames[] = {
      "build of the pipeline", "step with backward (1) or evaluation (0)", "number of microbatches"};
  HashBuilder combined;
  bool all_static = true;
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    for (std::size_t field = 0; field < 3; ++field)
      if (rows[rank][field] != rows[0][field])
        throw StepRefusal{std::make_exception_ptr(
            PipeliningMetadataError(describe(fmt::format("ranks of a pipeline disagree: {}", kNames[field]),
                                             fmt::format("{} on rank {}", rows[rank][field], ranks_[rank]),
                                             fmt::format("{}, as on rank {}", rows[0][field], ranks_[0]),
                                             "call step or eval on all ranks of the pipeline, with batches "
                                             "that split into the same number of microbatches")))};
    all_static = all_static && rows[rank][3] == 1;
    combined.add(rows[rank][4]);
  }
  const std::uint64_t key = combined.value();
  const auto known = steps_.find(key);
  if (known != steps_.end()) return known->second;

  static_ = all_static;
  // Limits memory if shapes never repeat. Every rank has seen the same combinations in the same order, so all
  // clear at the same time.
  if (steps_.size() >= kMostSteps) steps_.clear();
  if (plans_.size() >= kMostPlans) plans_.clear();
  const auto all_hashes = gather(hashes);
  std::vector<std::shared_ptr<const MicrobatchPlan>> plans;
  for (std::size_t m = 0; m < step.microbatches(); ++m) {
    // The chain that a microbatch runs through is part of its key.
    HashBuilder microbatch_key;
    for (const schedule::Chain& chain : map_.chains())
      microbatch_key.add(map_.runs(chain.first_stage, static_cast<int>(m)));
    for (const auto& row : all_hashes) microbatch_key.add(row[m]);
    std::shared_ptr<const MicrobatchPlan>& plan = plans_[microbatch_key.value()];
    if (!plan) plan = negotiate(step, m);
    plans.push_back(plan);
  }
  steps_.emplace(key, plans);
  return plans;
}

std::shared_ptr<const MicrobatchPlan> StagePlanner::negotiate(const StepDescription& step,
                                                              std::size_t microbatch) {
  Negotiation negotiation(*this, step, microbatch);
  std::vector<PipelineStage> taking_part;
  for (const PipelineStage& stage : stages_)
    if (map_.runs(stage.index(), static_cast<int>(microbatch))) taking_part.push_back(stage);
  for (const PipelineStage& stage : taking_part) negotiation.forward(stage);
  if (step.has_backward)
    for (auto stage = taking_part.rbegin(); stage != taking_part.rend(); ++stage)
      negotiation.backward(*stage);
  comm::wait_all(negotiation.sends);
  return negotiation.plans;
}

}  // namespace penstock
