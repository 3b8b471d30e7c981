#include "penstock/train/plan/part_costs.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/cuda.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "penstock/comm/launch/launch_cores.h"
#include "penstock/mode.h"
#include "penstock/pipeline/backward/graph_node.h"
#include "penstock/pipeline/backward/split_backward.h"
#include "penstock/step_context.h"
#include "penstock/torch/compat/thread_count.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/train/job/structure_metadata.h"
#include "penstock/train/report/elapsed.h"

namespace penstock::train {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRepeats = 3;
constexpr double kBudget = 0.3;   // seconds per part
constexpr double kRowBudget = 2;  // seconds for one row of a part; longer ones are extrapolated

// Tokens of the rows from which times are extrapolated.
constexpr std::int64_t kFewTokens = 16, kMoreTokens = 64;
// The same for bytes: up to so many keys attention computes all pairs at once, beyond in blocks, which keep
// none.
constexpr std::int64_t kPairsAtOnce = 1024;

// Memory allocated by operators that is still referenced. Views of what existed before, such as tables of
// rotary positions, do not count.
class LiveMemory final : public Mode {
 public:
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
    std::set<const void*> given;
    const std::size_t arguments = op.schema().arguments().size();
    for (std::size_t i = stack->size() - arguments; i < stack->size(); ++i)
      for_each_tensor((*stack)[i], [&](const at::Tensor& tensor) {
        if (tensor.has_storage()) given.insert(tensor.storage().unsafeGetStorageImpl());
      });
    op.callBoxed(stack);
    const std::size_t results = op.schema().returns().size();
    for (std::size_t i = stack->size() - results; i < stack->size(); ++i) {
      for_each_tensor((*stack)[i], [&](const at::Tensor& tensor) {
        if (!tensor.has_storage()) return;
        const c10::Storage& storage = tensor.storage();
        if (given.contains(storage.unsafeGetStorageImpl()) && !seen_.contains(storage.unsafeGetStorageImpl()))
          return;
        seen_.insert_or_assign(
            storage.unsafeGetStorageImpl(),
            Held{storage.getWeakStorageImpl(), static_cast<std::int64_t>(storage.nbytes())});
      });
    }
  }
  // Memory of the given tensors does not count.
  std::int64_t bytes_without(const std::vector<at::Tensor>& others) const {
    std::int64_t bytes = 0;
    for (const auto& [storage, held] : seen_) {
      const bool is_other = std::any_of(others.begin(), others.end(), [&](const at::Tensor& each) {
        return each.storage().unsafeGetStorageImpl() == storage;
      });
      if (!held.storage.expired() && !is_other) bytes += held.bytes;
    }
    return bytes;
  }

 private:
  struct Held {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::int64_t bytes;
  };
  std::map<const void*, Held> seen_;
};

// One part of the model with a microbatch as its input.
class Trial {
 public:
  Trial(const TrainConfig& config, const models::TrainableModel& model, const models::StagePart& part,
        at::Device device, std::int64_t rows, std::int64_t length, bool recomputes)
      : config_(config), device_(device), stage_(model.make_stage(part)) {
    if (recomputes) stage_->set_recompute(models::RecomputePlan::all());
    stage_->to(device);
    stage_->set_initial_values(static_cast<std::uint64_t>(config.training.seed));
    const at::TensorOptions numbers = at::TensorOptions().dtype(at::kLong).device(device);
    targets_ = at::randint(config.model.vocabulary, {rows, length}, numbers);
    const std::vector<TokenStructure> structure(static_cast<std::size_t>(rows * length));
    const std::vector<std::int64_t> documents(structure.size());
    inputs_ = model.inputs(
        {.tokens = targets_,
         .targets = targets_,
         .documents = at::zeros({rows, length}, numbers),
         .metadata = structure_metadata(
             structure_needs(config, {part}),
             {.tokens = structure, .documents = documents, .rows = rows, .length = length}, device)});
    input_ = part.has_embed()
                 ? targets_
                 : at::randn({rows, length, config.model.width}, at::TensorOptions().device(device))
                       .requires_grad_(true);
  }

  // Where the backward starts: the loss at the head, else hidden states.
  at::Tensor forward() {
    StepContext context;
    context.microbatch = 0;
    const StepGuard step(context);
    const AutocastScope scope(device_.type(), autocast());
    at::Tensor output = stage_->forward_with(input_, inputs_.keywords);
    return stage_->part().has_head() ? stage_->loss(output, targets_, static_cast<double>(targets_.numel()))
                                     : output;
  }
  void backward(const at::Tensor& output) {
    StepContext context;
    context.microbatch = 0;
    const StepGuard step(context);
    output.backward(at::ones_like(output));
    if (input_.requires_grad()) input_.mutable_grad() = at::Tensor();
  }

  PartMeasurement time(int repeats) {
    PartMeasurement best{.forward = std::numeric_limits<double>::infinity(),
                         .backward = std::numeric_limits<double>::infinity(),
                         .kept = 0};
    for (int i = 0; i < repeats; ++i) {
      auto begin = Clock::now();
      const at::Tensor output = forward();
      finish();
      best.forward = std::min(best.forward, seconds_since(begin));
      begin = Clock::now();
      backward(output);
      finish();
      best.backward = std::min(best.backward, seconds_since(begin));
    }
    return best;
  }

  // Between forward and backward, without the output, which is sent to the next stage. The input of a middle
  // stage is kept, too.
  std::int64_t kept() {
    make_tables();
    LiveMemory memory;
    NodePtr graph;
    {
      const ModeGuard guard(memory);
      graph = forward().grad_fn();
    }
    return memory.bytes_without(not_kept());
  }

  // Between the halves of a split backward, with the input if it is kept. On the CPU, whose backward runs on
  // this thread.
  std::int64_t kept_for_weights() {
    make_tables();
    const at::Tensor given = input_;
    LiveMemory memory;
    InputBackward half;
    {
      const ModeGuard guard(memory);
      OutputEdges edges;
      at::Tensor gradient;
      // A copy that only the graph holds in the end: a norm needs its input for the gradient of its scale.
      if (given.requires_grad()) input_ = given.detach().clone().requires_grad_(true);
      {
        const at::Tensor output = forward();
        edges = OutputEdges::of({output});
        gradient = at::ones_like(output);
      }
      StepContext context;
      context.microbatch = 0;
      const StepGuard step(context);
      half = stage_backward_input(std::move(edges), {std::move(gradient)}, {input_});
      input_ = given;
    }
    half.input_grads.clear();
    const std::int64_t bytes = memory.bytes_without(not_kept());
    for (const at::Tensor& parameter : stage_->parameters()) parameter.mutable_grad() = at::Tensor();
    return bytes;
  }

 private:
  // What the first forward makes for all that follow.
  void make_tables() {
    const c10::AutoGradMode no_grad(false);
    (void)forward();
  }
  // Tensors that exist anyway.
  std::vector<at::Tensor> not_kept() const {
    std::vector<at::Tensor> others = stage_->parameters();
    for (const at::Tensor& parameter : stage_->parameters())
      if (parameter.grad().defined()) others.push_back(parameter.grad());
    others.insert(others.end(), {targets_, input_});
    for (const at::Tensor& tensor : tensors_of(inputs_.keywords)) others.push_back(tensor);
    return others;
  }
  std::optional<at::ScalarType> autocast() const {
    if (config_.training.precision == "bf16") return at::kBFloat16;
    if (config_.training.precision == "fp16") return at::kHalf;
    return std::nullopt;
  }
  void finish() const {
    if (device_.is_cuda()) torch::cuda::synchronize();
  }

  const TrainConfig& config_;
  at::Device device_;
  std::shared_ptr<models::ModelStage> stage_;
  models::StageInputs inputs_;
  at::Tensor targets_, input_;
};

// The value at `length` of a line through two points.
double on_a_line(double one, double at_one, double two, double at_two, double length) {
  return at_two + std::max(0.0, at_two - at_one) * (length - two) / (two - one);
}
// Values at n, 2n and 3n tokens, and a parabola through them: bytes that do not depend on the tokens, that
// are proportional to them, and to their pairs.
double on_a_parabola(double one, double two, double three, double n, double length) {
  const double x = length / n, bend = (three - 2 * two + one) / 2, slope = two - one - 3 * bend,
               start = one - slope - bend;
  return start + slope * x + bend * x * x;
}

std::int64_t rounded_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

// Measures parts of a model, each by trials of one row or, where a row would take too long, of shorter ones.
class PartMeter {
 public:
  PartMeter(const TrainConfig& config, const models::TrainableModel& model, at::Device device, bool splits)
      : config_(config),
        model_(model),
        device_(device),
        splits_(splits && device.is_cpu()),
        rows_(config.layout.microbatch_size),
        length_(config.model.context),
        measured_rows_(rows_),
        measured_tokens_(length_) {}

  // Whether the blocks of the parts to come are recomputed.
  void set_recomputes(bool recomputes) { recomputes_ = recomputes; }

  // For a microbatch.
  PartMeasurement measure(const models::StagePart& part) {
    const bool slow = is_slow(part);
    PartMeasurement measured = slow ? extrapolated_row(part) : whole_row(part);
    if (slow) measured_tokens_ = kMoreTokens;
    const double all_rows = (measured.forward + measured.backward) * static_cast<double>(rows_);
    if (slow || rows_ == 1 || all_rows * kRepeats > kBudget) {
      measured_rows_ = 1;
      measured.forward *= static_cast<double>(rows_);
      measured.backward *= static_cast<double>(rows_);
    } else {
      const PartMeasurement all = trial(part, rows_, length_).time(kRepeats);
      measured.forward = all.forward;
      measured.backward = all.backward;
    }
    const bool is_quick = !slow && measured.forward < kBudget * static_cast<double>(rows_);
    measured.kept = bytes(part, slow, is_quick, &Trial::kept);
    if (splits_) measured.kept_for_weights = bytes(part, slow, is_quick, &Trial::kept_for_weights);
    return measured;
  }
  // Bytes that a microbatch keeps.
  std::int64_t kept(const models::StagePart& part) { return bytes(part, is_slow(part), false, &Trial::kept); }

  std::int64_t measured_rows() const { return measured_rows_; }
  std::int64_t measured_tokens() const { return measured_tokens_; }

 private:
  using Bytes = std::int64_t (Trial::*)();

  Trial trial(const models::StagePart& part, std::int64_t rows, std::int64_t tokens) const {
    return Trial(config_, model_, part, device_, rows, tokens, recomputes_);
  }
  // Of a microbatch. Some bytes may serve all rows: two rows tell, if that takes no time.
  std::int64_t bytes(const models::StagePart& part, bool slow, bool is_quick, Bytes count) const {
    if (slow) return extrapolated_bytes(part, count) * rows_;
    const std::int64_t one = (trial(part, 1, length_).*count)();
    if (rows_ == 1 || !is_quick) return one * rows_;
    return one + ((trial(part, 2, length_).*count)() - one) * (rows_ - 1);
  }

  // Of one row: the second of two runs, because the first loads kernels and allocates memory, unless it takes
  // long.
  PartMeasurement time_of(const models::StagePart& part, std::int64_t tokens) const {
    Trial one = trial(part, 1, tokens);
    const PartMeasurement first = one.time(1);
    return first.forward + first.backward > kRowBudget / 2 ? first : one.time(1);
  }

  // Whether one row would take too long, by short ones.
  bool is_slow(const models::StagePart& part) const {
    if (length_ <= 4 * kMoreTokens) return false;
    const auto row_time = [&](std::int64_t tokens) {
      const PartMeasurement measured = time_of(part, tokens);
      return (measured.forward + measured.backward) * static_cast<double>(length_ / tokens);
    };
    // What takes long for few tokens as well may be the weights: look at more of them, unless it is clear.
    const double first = row_time(kFewTokens);
    return first > 20 * kRowBudget || (first > kRowBudget && row_time(kMoreTokens) > kRowBudget);
  }

  PartMeasurement whole_row(const models::StagePart& part) const {
    Trial one = trial(part, 1, length_);
    one.time(1);  // loads kernels and allocates memory
    return one.time(1);
  }

  PartMeasurement extrapolated_row(const models::StagePart& part) const {
    const PartMeasurement few = time_of(part, kFewTokens), more = time_of(part, kMoreTokens);
    const auto row = [&](double one, double two) {
      return on_a_line(kFewTokens, one, kMoreTokens, two, static_cast<double>(length_));
    };
    return {.forward = row(few.forward, more.forward), .backward = row(few.backward, more.backward)};
  }

  std::int64_t extrapolated_bytes(const models::StagePart& part, Bytes count) const {
    // Chunks of state-space blocks must be whole.
    const std::vector<models::BlockPlan>& blocks = model_.plan().blocks;
    std::int64_t unit = kMoreTokens;
    for (std::int64_t i = part.first_block; i < part.end_block; ++i)
      if (blocks[static_cast<std::size_t>(i)].kind.find("state space") != std::string::npos)
        unit = rounded_up(unit, config_.model.state_chunk);
    const bool in_blocks = length_ > kPairsAtOnce;
    const std::int64_t n = in_blocks ? rounded_up(kPairsAtOnce + 1, unit) : unit;
    if (length_ <= (in_blocks ? 2 : 3) * n) return (trial(part, 1, length_).*count)();
    const auto at = [&](std::int64_t tokens) {
      return static_cast<double>((trial(part, 1, tokens).*count)());
    };
    const auto to = static_cast<double>(length_), from = static_cast<double>(n);
    return static_cast<std::int64_t>(in_blocks ? on_a_line(from, at(n), 2 * from, at(2 * n), to)
                                               : on_a_parabola(at(n), at(2 * n), at(3 * n), from, to));
  }

  const TrainConfig& config_;
  const models::TrainableModel& model_;
  const at::Device device_;
  const bool splits_;
  const std::int64_t rows_, length_;
  bool recomputes_ = false;
  std::int64_t measured_rows_, measured_tokens_;
};

// One block, as the middle one of three stages.
models::StagePart blocks_alone(std::int64_t first, std::int64_t end) {
  return {.index = 1, .count = 3, .first_block = first, .end_block = end};
}

// What two blocks of a kind in one stage keep only once. `kept`: by one of them.
std::int64_t shared_bytes(PartMeter& meter, const std::vector<models::BlockPlan>& blocks, std::int64_t first,
                          std::int64_t kept, std::int64_t border) {
  constexpr std::int64_t kFar = 8;  // blocks in between take time
  const auto count = static_cast<std::int64_t>(blocks.size());
  const std::string& kind = blocks[static_cast<std::size_t>(first)].kind;
  for (std::int64_t i = first + 1; i < std::min(count, first + kFar); ++i) {
    if (blocks[static_cast<std::size_t>(i)].kind != kind) continue;
    const std::int64_t before = i == first + 1 ? kept : meter.kept(blocks_alone(first, i)),
                       after = meter.kept(blocks_alone(first, i + 1));
    return std::max<std::int64_t>(0, kept - (after - before - border));
  }
  return 0;
}

}  // namespace

PartMeasurements measure_parts(const TrainConfig& config, const models::TrainableModel& model,
                               at::Device device, const models::RecomputePlan& recompute, bool splits) {
  PartMeasurements result;
  result.threads = comm::threads_per_rank(comm::available_cores(), static_cast<int>(config.layout.ranks));
  result.border = config.layout.microbatch_size * config.model.context * config.model.width *
                  static_cast<std::int64_t>(sizeof(float));
  const ThreadCountScope threads(result.threads);
  PartMeter meter(config, model, device, splits);
  // Of three stages: only the embedding, only one block, only the head.
  const std::vector<models::BlockPlan>& blocks = model.plan().blocks;
  const auto layers = static_cast<std::int64_t>(blocks.size());
  result.embed = meter.measure({.index = 0, .count = 3, .first_block = 0, .end_block = 0});
  for (std::int64_t i = 0; i < layers; ++i) {
    const models::BlockPlan& block = blocks[static_cast<std::size_t>(i)];
    if (!result.blocks.contains(block.kind)) {
      const PartMeasurement& measured = result.blocks[block.kind] = meter.measure(blocks_alone(i, i + 1));
      // Blocks of other letters share nothing.
      if (block.letter == 'A')
        result.shared[block.kind] = shared_bytes(meter, blocks, i, measured.kept, result.border);
    }
    if (recompute.chooses({.number = i, .letter = block.letter}) && !result.recomputed.contains(block.kind)) {
      meter.set_recomputes(true);
      result.recomputed[block.kind] = meter.measure(blocks_alone(i, i + 1));
      meter.set_recomputes(false);
    }
  }
  const models::StagePart head{.index = 2, .count = 3, .first_block = layers, .end_block = layers};
  result.head = meter.measure(head);
  const std::string& letters = model.plan().multi_token_letters;
  if (!letters.empty() && recompute.chooses({.number = layers, .letter = letters.front()})) {
    meter.set_recomputes(true);
    result.recomputed_head = meter.measure(head);
    meter.set_recomputes(false);
  }
  result.measured_rows = meter.measured_rows();
  result.measured_tokens = meter.measured_tokens();
  return result;
}

}  // namespace penstock::train
