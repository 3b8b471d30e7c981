#include "penstock/pipeline/stage_plan.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "penstock/base/errors.h"
#include "penstock/base/hash.h"
#include "penstock/base/log.h"
#include "penstock/comm/message.h"
#include "penstock/comm/record_messages.h"
#include "penstock/pipeline/stage_trial.h"
#include "penstock/torch/record_checks.h"

namespace penstock::pipeline {

namespace {

constexpr comm::MessageKind kForwardKind{"PFWD"};
constexpr comm::MessageKind kBackwardKind{"PBWD"};
constexpr std::uint16_t kVersion = 1;
constexpr std::int64_t kRowVersion = 1;

// What one stage tells another about the tensors it will send.
struct ForwardWord {
  bool is_static = false;  // examples hold for this microbatch
  bool announced = false;
  TensorMetas metas;
};
struct BackwardWord {
  OptionalTensorMetas metas;
};

std::vector<std::uint8_t> to_bytes(const ForwardWord& word) {
  comm::MessageWriter writer(kForwardKind, kVersion);
  writer.write(word.is_static).write(word.announced).write(StageForwardMeta(word.metas));
  return writer.finish();
}
std::vector<std::uint8_t> to_bytes(const BackwardWord& word) {
  comm::MessageWriter writer(kBackwardKind, kVersion);
  writer.write(StageBackwardMeta(word.metas));
  return writer.finish();
}
void from_bytes(const std::vector<std::uint8_t>& bytes, ForwardWord& word) {
  comm::MessageReader reader(bytes, kForwardKind, {kVersion, kVersion});
  reader.read(word.is_static).read(word.announced);
  word.metas = reader.read<StageForwardMeta>().outputs();
  reader.expect_end();
}
void from_bytes(const std::vector<std::uint8_t>& bytes, BackwardWord& word) {
  comm::MessageReader reader(bytes, kBackwardKind, {kVersion, kVersion});
  word.metas = reader.read<StageBackwardMeta>().input_grads();
  reader.expect_end();
}

// Examples none of which requires grad were made without a thought of it: floating point ones then stand for tensors that need it.
TensorMetas with_default_grads(TensorMetas metas, bool has_backward) {
  if (!has_backward || std::any_of(metas.begin(), metas.end(), [](const TensorMeta& meta) { return requires_grad(meta); })) return metas;
  for (TensorMeta& meta : metas) {
    if (!at::isFloatingType(local_record(meta).dtype()) && !at::isComplexType(local_record(meta).dtype())) continue;
    meta = std::visit([](const auto& record) -> TensorMeta { return record.with_requires_grad(true); }, meta);
  }
  return metas;
}

// What travels is contiguous, whatever the layout on either side was.
TensorMeta as_sent(const TensorMeta& meta) {
  const auto contiguous = [](const TensorRecord& record) { return TensorRecord::contiguous(record.shape(), record.dtype(), record.requires_grad()); };
  if (const auto* plain = std::get_if<TensorRecord>(&meta)) return contiguous(*plain);
  const auto& whole = std::get<DistributedRecord>(meta);
  return DistributedRecord(contiguous(whole.local()), whole.global_shape(), whole.global_stride(), whole.placements(), whole.mesh_key());
}
TensorMetas as_sent(TensorMetas metas) {
  for (TensorMeta& meta : metas) meta = as_sent(meta);
  return metas;
}
OptionalTensorMetas as_sent(OptionalTensorMetas metas) {
  for (auto& meta : metas)
    if (meta) meta = as_sent(*meta);
  return metas;
}

}  // namespace

// One negotiation: words between stages, over ranks or within this one.
struct StagePlanner::Negotiation {
  explicit Negotiation(StagePlanner& owner) : planner(owner) {}

  StagePlanner& planner;
  std::map<std::pair<int, int>, ForwardWord> forward_here;  // by (channel number, stage) of words that stay on this rank
  std::map<std::pair<int, int>, BackwardWord> backward_here;
  std::vector<comm::Work> sends;

  // Channel 0: neighbours; 1 + k: skip k.
  int tag(int channel, int stage, bool backward) const { return ((1 + channel) * planner.map_.stages() + stage) * 4 + (backward ? 2 : 0); }
  int rank_of(int stage) const { return planner.map_.rank_of(StageId{stage}); }

  void send_bytes(const std::vector<std::uint8_t>& bytes, int to_stage, int tag) {
    const Rank peer{planner.ranks_[static_cast<std::size_t>(rank_of(to_stage))]};
    at::Tensor size = at::empty({1}, at::kLong);
    *size.data_ptr<std::int64_t>() = static_cast<std::int64_t>(bytes.size());
    at::Tensor payload = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
    std::memcpy(payload.data_ptr(), bytes.data(), bytes.size());
    sends.push_back(planner.control_.isend(size, peer, {.tag = tag, .label = "size of a stage's records", .timeout = {}}));
    sends.push_back(planner.control_.isend(payload, peer, {.tag = tag + 1, .label = "records of a stage", .timeout = {}}));
  }
  std::vector<std::uint8_t> receive_bytes(int from_stage, int tag) const {
    const Rank peer{planner.ranks_[static_cast<std::size_t>(rank_of(from_stage))]};
    at::Tensor size = at::empty({1}, at::kLong);
    planner.control_.recv(size, peer, {.tag = tag, .label = "size of a stage's records", .timeout = {}});
    const std::int64_t count = *size.data_ptr<std::int64_t>();
    if (count < 0 || count > static_cast<std::int64_t>(comm::kDefaultMaxMessageBytes))
      throw PipeliningMetadataError(describe("records of stage " + std::to_string(from_stage), fmt::format("{} bytes", count),
                                             fmt::format("at most {}", comm::kDefaultMaxMessageBytes), "run the same build on all ranks"));
    at::Tensor payload = at::empty({count}, at::kByte);
    planner.control_.recv(payload, peer, {.tag = tag + 1, .label = "records of a stage", .timeout = {}});
    const auto* data = payload.data_ptr<std::uint8_t>();
    return {data, data + count};
  }

  void tell_forward(int channel, int from, int to, ForwardWord word) {
    if (rank_of(to) == planner.own_) {
      forward_here[{channel, to}] = std::move(word);
    } else {
      send_bytes(to_bytes(word), to, tag(channel, from, false));
    }
  }
  ForwardWord hear_forward(int channel, int from, int to) {
    ForwardWord word;
    if (rank_of(from) == planner.own_) {
      word = std::move(forward_here.at({channel, to}));
    } else {
      from_bytes(receive_bytes(from, tag(channel, from, false)), word);
    }
    return word;
  }
  void tell_backward(int channel, int from, int to, BackwardWord word) {
    if (rank_of(to) == planner.own_) {
      backward_here[{channel, to}] = std::move(word);
    } else {
      send_bytes(to_bytes(word), to, tag(channel, from, true));
    }
  }
  BackwardWord hear_backward(int channel, int from, int to) {
    BackwardWord word;
    if (rank_of(from) == planner.own_) {
      word = std::move(backward_here.at({channel, to}));
    } else {
      from_bytes(receive_bytes(from, tag(channel, from, true)), word);
    }
    return word;
  }
};

StagePlanner::StagePlanner(std::vector<PipelineStage> stages, schedule::StageMap map, std::vector<SkipTensor> skips, PipelineLoss loss,
                           comm::Group control, std::vector<int> ranks, int own)
    : stages_(std::move(stages)), map_(std::move(map)), skips_(std::move(skips)), loss_(std::move(loss)), control_(std::move(control)),
      ranks_(std::move(ranks)), own_(own) {}

std::uint64_t StagePlanner::hash_of(const StepDescription& step, std::size_t microbatch) const {
  HashBuilder hash;
  hash.add(step.has_backward);
  const auto add = [&](const Tree& tree) {
    hash.add(TreeSpec(tree));
    for (const at::Tensor& tensor : tensors_of(tree)) hash.add(meta_of(tensor));
  };
  for (const PipelineStage& stage : stages_) {
    if (!map_.runs(StageId{stage.index()}, MicrobatchId{static_cast<int>(microbatch)})) continue;
    hash.add(stage.index());
    if (map_.is_first(StageId{stage.index()})) add(step.args[microbatch]);
    add(step.kwargs[microbatch]);
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

std::vector<std::shared_ptr<const MicrobatchPlan>> StagePlanner::agree(const StepDescription& step) {
  std::vector<std::int64_t> hashes;
  HashBuilder whole;
  for (std::size_t m = 0; m < step.microbatches(); ++m) {
    hashes.push_back(static_cast<std::int64_t>(hash_of(step, m)));
    whole.add(hashes.back());
  }
  const bool vote = std::none_of(stages_.begin(), stages_.end(), [&](const PipelineStage& stage) { return stage.needs_trial(step.has_backward); });
  const auto rows = gather({kRowVersion, step.has_backward ? 1 : 0, static_cast<std::int64_t>(step.microbatches()), vote ? 1 : 0, static_cast<std::int64_t>(whole.value())});

  static constexpr const char* kNames[] = {"build of the pipeline", "step with backward (1) or evaluation (0)", "number of microbatches"};
  HashBuilder combined;
  bool all_static = true;
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    for (std::size_t field = 0; field < 3; ++field)
      if (rows[rank][field] != rows[0][field])
        throw PipeliningMetadataError(describe(fmt::format("ranks of a pipeline disagree: {}", kNames[field]), fmt::format("{} on rank {}", rows[rank][field], ranks_[rank]),
                                               fmt::format("{}, as on rank {}", rows[0][field], ranks_[0]),
                                               "call step or eval on all ranks of the pipeline, with batches that split into as many microbatches"));
    all_static = all_static && rows[rank][3] == 1;
    combined.add(rows[rank][4]);
  }
  const std::uint64_t key = combined.value();
  const auto known = steps_.find(key);
  if (known != steps_.end()) return known->second;

  static_ = all_static;
  const auto all_hashes = gather(hashes);
  std::vector<std::shared_ptr<const MicrobatchPlan>> plans;
  for (std::size_t m = 0; m < step.microbatches(); ++m) {
    // Which chain a microbatch passes is part of what it is.
    HashBuilder microbatch_key;
    for (const schedule::Chain& chain : map_.chains()) microbatch_key.add(map_.runs(StageId{chain.first_stage}, MicrobatchId{static_cast<int>(m)}));
    for (const auto& row : all_hashes) microbatch_key.add(row[m]);
    std::shared_ptr<const MicrobatchPlan>& plan = plans_[microbatch_key.value()];
    if (!plan) plan = negotiate(step, m);
    plans.push_back(plan);
  }
  steps_.emplace(key, plans);
  return plans;
}

std::shared_ptr<const MicrobatchPlan> StagePlanner::negotiate(const StepDescription& step, std::size_t microbatch) {
  Negotiation words(*this);
  auto result = std::make_shared<MicrobatchPlan>();
  std::map<int, std::unique_ptr<StageTrial>> trials;
  const auto runs = [&](const PipelineStage& stage) { return map_.runs(StageId{stage.index()}, MicrobatchId{static_cast<int>(microbatch)}); };
  const auto skips_into = [&](int stage, const auto& visit) {
    for (std::size_t k = 0; k < skips_.size(); ++k)
      if (skips_[k].to == stage) visit(static_cast<int>(k) + 1, skips_[k]);
  };
  const auto skips_from = [&](int stage, const auto& visit) {
    for (std::size_t k = 0; k < skips_.size(); ++k)
      if (skips_[k].from == stage) visit(static_cast<int>(k) + 1, skips_[k]);
  };

  for (const PipelineStage& stage : stages_) {
    if (!runs(stage)) continue;
    const int s = stage.index();
    StagePlan& plan = (*result)[s];
    const bool first = map_.is_first(StageId{s});
    const bool last = map_.is_last(StageId{s});
    const StageMeta& examples = stage.example_meta();
    const Tree& args = step.args[microbatch];

    bool is_static = static_;
    if (first) {
      plan.meta.inputs = metas_of(tensors_of(args));
      plan.main_inputs = plan.meta.inputs->size();
      is_static = is_static && check_metas("", *examples.inputs, *plan.meta.inputs, OnMismatch::Collect).empty();
    } else {
      ForwardWord word = words.hear_forward(0, s - 1, s);
      plan.announced_inputs = word.announced;
      is_static = word.is_static;
      plan.main_inputs = word.metas.size();
      plan.meta.inputs = std::move(word.metas);
    }
    skips_into(s, [&](int channel, const SkipTensor& skip) {
      const ForwardWord word = words.hear_forward(channel, skip.from, s);
      plan.announced_inputs = plan.announced_inputs || word.announced;
      plan.meta.inputs->insert(plan.meta.inputs->end(), word.metas.begin(), word.metas.end());
    });

    if (is_static) {
      if (!first) {
        const TensorMetas expected = as_sent(*examples.inputs);
        check_metas(fmt::format("example inputs of stage {} and what stage {} sends", s, s - 1), expected, *plan.meta.inputs);
      }
      plan.meta.outputs = with_default_grads(*examples.outputs, step.has_backward);
    } else {
      auto trial = std::make_unique<StageTrial>(stage, step.has_backward);
      ++trials_;
      if (first) {
        trial->forward(args, step.kwargs[microbatch]);
      } else {
        trial->forward(*plan.meta.inputs, step.kwargs[microbatch]);
      }
      plan.meta.outputs = trial->outputs();
      plan.announced_outputs = trial->data_dependent();
      if (examples.outputs && !last)
        check_metas(fmt::format("example outputs of stage {}", s), *examples.outputs, *plan.meta.outputs, OnMismatch::Warn);
      if (examples.inputs && !first)
        check_metas(fmt::format("example inputs of stage {}", s), as_sent(*examples.inputs), *plan.meta.inputs, OnMismatch::Warn);
      trials[s] = std::move(trial);
    }
    plan.announced_outputs = plan.announced_outputs || plan.announced_inputs || stage.options().announce_shapes;

    std::size_t skipped = 0;
    skips_from(s, [&](int, const SkipTensor&) { ++skipped; });
    const std::size_t made = plan.meta.outputs->size();
    if (made < skipped + (last ? 0 : 1))
      throw PipeliningMetadataError(describe(fmt::format("outputs of stage {}", s), fmt::format("{} tensors", made),
                                             fmt::format("at least {}: its own outputs, then {} for skip connections", skipped + 1, skipped),
                                             "return the tensors of skip connections last, in the order of their declaration"));
    plan.main_outputs = made - skipped;
    if (!last) {
      ForwardWord word{is_static, plan.announced_outputs, as_sent(*plan.meta.outputs)};
      std::size_t next = plan.main_outputs;
      skips_from(s, [&](int channel, const SkipTensor& skip) { words.tell_forward(channel, s, skip.to, {is_static, plan.announced_outputs, {word.metas[next++]}}); });
      word.metas.resize(plan.main_outputs);
      words.tell_forward(0, s, s + 1, std::move(word));
    }
  }

  if (step.has_backward) {
    for (auto at = stages_.rbegin(); at != stages_.rend(); ++at) {
      const PipelineStage& stage = *at;
      if (!runs(stage)) continue;
      const int s = stage.index();
      StagePlan& plan = result->at(s);
      const bool first = map_.is_first(StageId{s});
      const bool last = map_.is_last(StageId{s});
      if (!last) {
        plan.meta.output_grads = words.hear_backward(0, s + 1, s).metas;
        skips_from(s, [&](int channel, const SkipTensor& skip) {
          const BackwardWord word = words.hear_backward(channel, skip.to, s);
          plan.meta.output_grads->insert(plan.meta.output_grads->end(), word.metas.begin(), word.metas.end());
        });
        if (plan.meta.output_grads->size() != plan.meta.outputs->size())
          throw PipeliningMetadataError(describe(fmt::format("gradients that come back to stage {}", s), fmt::format("{}", plan.meta.output_grads->size()),
                                                 fmt::format("{}, one for each output", plan.meta.outputs->size()), "let the next stage take every output"));
      }
      if (first) {
        plan.meta.input_grads = OptionalTensorMetas(plan.meta.inputs->size());
      } else {
        const auto trial = trials.find(s);
        const StageMeta& examples = stage.example_meta();
        if (trial == trials.end()) {
          plan.meta.input_grads = examples.input_grads ? as_sent(*examples.input_grads) : derive_gradient_metas(*plan.meta.inputs);
        } else {
          try {
            last ? trial->second->backward_of_loss(loss_, step.targets[microbatch]) : trial->second->backward(*plan.meta.output_grads);
            plan.meta.input_grads = trial->second->input_grads();
          } catch (const PipeliningMetadataError&) {
            throw;
          } catch (const std::exception& error) {
            // A loss that reads values cannot be tried on fake tensors; plain gradients are like their tensors.
            if (!last || plan.meta.has_distributed()) throw;
            log().debug("pipeline: the loss of stage {} cannot be tried: {}", s, error.what());
            plan.meta.input_grads = derive_gradient_metas(*plan.meta.inputs);
          }
          if (examples.input_grads)
            check_metas(fmt::format("example gradients of the inputs of stage {}", s), as_sent(*examples.input_grads), *plan.meta.input_grads, OnMismatch::Warn);
        }
        BackwardWord word{as_sent(*plan.meta.input_grads)};
        std::size_t next = plan.main_inputs;
        skips_into(s, [&](int channel, const SkipTensor& skip) { words.tell_backward(channel, s, skip.from, {{word.metas[next++]}}); });
        word.metas.resize(plan.main_inputs);
        words.tell_backward(0, s, s - 1, std::move(word));
      }
    }
  }
  comm::wait_all(words.sends);
  return result;
}

}  // namespace penstock::pipeline
