#include "penstock/recompute.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/mode.h"
#include "penstock/step_context.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/dispatch/gradient_sink.h"
#include "penstock/torch/random/generator_state.h"
#include "penstock/torch/random/unit_half.h"
#include "penstock/torch/recompute/recomputed_state.h"
#include "penstock/torch/recompute/saved_tensor_hooks.h"

namespace penstock {
namespace {

struct RegisteredStates {
  std::mutex mutex;
  std::vector<std::function<RestoreState()>> captures;

  static RegisteredStates& all() {
    static RegisteredStates& states = *new RegisteredStates;  // threads may outlive static objects
    return states;
  }

  std::vector<RestoreState> capture() {
    const std::lock_guard lock(mutex);
    std::vector<RestoreState> states;
    for (const auto& each : captures) states.push_back(each());
    return states;
  }
};

// The states of the default generators of the CPU and of the devices of some tensors. While a graph is
// recorded these are values of the graph: a replay exchanges the states of its own run.
class GeneratorStates {
 public:
  explicit GeneratorStates(const std::vector<at::Tensor>& tensors) {
    add(at::kCPU);
    for (const at::Tensor& tensor : tensors)
      if (tensor.defined() && tensor.is_cuda()) add(tensor.device());
  }

  // Exchanges these states with those of the generators.
  void exchange() {
    for (Entry& entry : entries_) {
      const at::Tensor now = read(entry.device);
      if (recorded_)
        set_recorded_generator_state(entry.device, entry.state);
      else
        set_generator_state(default_generator(entry.device), entry.state);
      entry.state = now;
    }
  }

 private:
  struct Entry {
    at::Device device;
    at::Tensor state;
  };

  void add(at::Device device) {
    for (const Entry& entry : entries_)
      if (entry.device == device) return;
    entries_.push_back({device, read(device)});
  }
  at::Tensor read(at::Device device) const {
    return recorded_ ? recorded_generator_state(device) : generator_state(default_generator(device));
  }

  const bool recorded_ = is_recording();
  std::vector<Entry> entries_;
};

// Gives the generators other states for a scope.
class GeneratorScope {
 public:
  explicit GeneratorScope(std::optional<GeneratorStates>& states) : states_(states) {
    if (states_) states_->exchange();
  }
  ~GeneratorScope() {
    if (states_) states_->exchange();
  }
  GeneratorScope(const GeneratorScope&) = delete;
  GeneratorScope& operator=(const GeneratorScope&) = delete;

 private:
  std::optional<GeneratorStates>& states_;
};

// What the thread of a forward has set that the second run must find.
class ForwardState {
 public:
  ForwardState(const std::vector<at::Tensor>& inputs, const RecomputeOptions& options)
      : step_(std::make_shared<const StepContext>(StepContext::current()->recomputation())),
        autocast_(autocast_state()),
        others_(RegisteredStates::all().capture()) {
    if (options.preserve_generators) generators_.emplace(inputs);
  }

  template <class Body>
  void run(const Body& body) {
    const at::AutoGradMode recording(true);
    const StepGuard step(step_);
    const AutocastStateScope autocast(autocast_);
    const OwnAutocastCache casts;
    std::vector<std::shared_ptr<void>> held;
    for (const RestoreState& restore : others_) held.push_back(restore());
    // The other half of an overlapped unit must not draw from generators that are set back.
    std::optional<UnitHalfGuard> alone;
    if (generators_) alone.emplace(nullptr);
    const GeneratorScope generators(generators_);
    body();
  }

 private:
  std::shared_ptr<const StepContext> step_;
  AutocastState autocast_;
  std::vector<RestoreState> others_;
  std::optional<GeneratorStates> generators_;
};

std::string saved_text(at::IntArrayRef sizes, at::ScalarType dtype) {
  return fmt::format("{} [{}]", c10::toString(dtype), fmt::join(sizes, ", "));
}

[[noreturn]] void refuse_other_tensors(const std::string& actual, const std::string& expected) {
  throw StateError(
      describe("recompute: tensors that the second run of a function saves for its backward", actual,
               expected + ", as in the first run",
               "let the function do the same in both runs: no dependence on values that change in between"));
}

// Ends a second run that has saved everything. Not a std::exception, which code in between may catch to add
// to its message.
struct SecondRunIsDone {};

// One run of a function: what a second run needs, and the places of the tensors that autograd saves.
//
// Slots are numbered in the order in which the forward saves. A slot is empty until the second run fills all
// of them, and again when its node is released. Leaves that require gradients, parameters above all, are kept
// by the nodes themselves: they exist anyway, and a gathered parameter must be found as what it is.
class RecomputedRun {
 public:
  using Computation = std::function<void(const std::vector<at::Tensor>&)>;

  RecomputedRun(Computation function, const std::vector<at::Tensor>& inputs, const RecomputeOptions& options)
      : function_(std::move(function)),
        state_(std::in_place, inputs, options),
        early_stop_(options.early_stop) {
    for (const at::Tensor& input : inputs) inputs_.push_back(as_input(input));
  }

  // The place of a tensor that the first run saves.
  std::size_t add(const at::Tensor& tensor, bool kept) {
    slots_.push_back({tensor.sizes().vec(), tensor.scalar_type(), !kept, {}});
    return slots_.size() - 1;
  }
  // The next tensor of the second run.
  void fill(const at::Tensor& tensor) {
    if (next_ == slots_.size()) {
      // Only where the function has caught the end of the run.
      if (early_stop_) throw SecondRunIsDone();
      refuse_other_tensors(
          fmt::format("more, beginning with {}", saved_text(tensor.sizes(), tensor.scalar_type())),
          fmt::format("{}", slots_.size()));
    }
    Slot& slot = slots_[next_++];
    if (tensor.sizes() != at::IntArrayRef(slot.sizes) || tensor.scalar_type() != slot.dtype)
      refuse_other_tensors(
          fmt::format("{} as number {}", saved_text(tensor.sizes(), tensor.scalar_type()), next_),
          saved_text(slot.sizes, slot.dtype));
    // Without the graph of the second run, which no backward goes through.
    if (slot.wanted) {
      slot.tensor = tensor.detach();
      slot.version = version_of(tensor);
    }
    if (early_stop_ && next_ == slots_.size()) throw SecondRunIsDone();
  }

  at::Tensor get(std::size_t slot) {
    const std::lock_guard lock(mutex_);
    if (state_) run_again();
    const Slot& found = slots_[slot];
    // LibTorch checks this only for tensors that it holds itself.
    if (version_of(found.tensor) != found.version)
      throw StateError(describe("recompute: a tensor that is needed for the gradient",
                                "written by an operator in place", "the values that were saved",
                                "use an operator that is not in place"));
    return found.tensor;
  }
  void release(std::size_t slot) {
    const std::lock_guard lock(mutex_);
    slots_[slot].wanted = false;
    slots_[slot].tensor.reset();
  }

 private:
  struct Slot {
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype;
    bool wanted;        // a node will ask for it
    at::Tensor tensor;  // detached; shares the version counter
    std::optional<std::int64_t> version = {};
  };
  struct Input {
    at::Tensor tensor;  // detached; shares the version counter
    std::optional<std::int64_t> version;
  };

  // The number of writes in place.
  static std::optional<std::int64_t> version_of(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_inference()) return std::nullopt;
    return tensor._version();
  }

  static Input as_input(const at::Tensor& input) {
    if (!input.defined()) return {};
    at::Tensor own = input.detach();
    if (input.requires_grad()) own.requires_grad_(true);
    return {own, version_of(input)};
  }

  void run_again();

  Computation function_;
  std::vector<Input> inputs_;
  std::optional<ForwardState> state_;  // until the second run
  const bool early_stop_;
  std::vector<Slot> slots_;
  std::size_t next_ = 0;
  std::mutex mutex_;
};

thread_local bool part_is_open = false, recomputing = false;

// Marks this thread for a scope.
class ThreadMark {
 public:
  explicit ThreadMark(bool& mark) : mark_(mark), before_(std::exchange(mark, true)) {}
  ~ThreadMark() { mark_ = before_; }
  ThreadMark(const ThreadMark&) = delete;
  ThreadMark& operator=(const ThreadMark&) = delete;

 private:
  bool& mark_;
  bool before_;
};

// Leaves a tensor out of its node.
class LeaveOut final : public torch::autograd::SavedVariableHooks {
 public:
  explicit LeaveOut(std::shared_ptr<RecomputedRun> run) : run_(std::move(run)) {}
  ~LeaveOut() override {
    if (slot_) run_->release(*slot_);
  }
  LeaveOut(const LeaveOut&) = delete;
  LeaveOut& operator=(const LeaveOut&) = delete;

  void call_pack_hook(const at::Tensor& tensor) override {
    const bool keep = tensor.is_leaf() && tensor.requires_grad();
    const std::size_t slot = run_->add(tensor, keep);
    if (!keep) {
      slot_ = slot;
      return;
    }
    leaf_ = tensor;
    // LibTorch holds it weakly, and a split backward removes the edges that lead to inputs.
    accumulator_ = torch::autograd::impl::grad_accumulator(tensor);
  }
  at::Tensor call_unpack_hook() override { return slot_ ? run_->get(*slot_) : leaf_; }

 private:
  std::shared_ptr<RecomputedRun> run_;
  std::optional<std::size_t> slot_;
  at::Tensor leaf_;
  AccumulatorPtr accumulator_;
};

// Takes a tensor of the second run; its own graph has no backward.
class TakeOut final : public torch::autograd::SavedVariableHooks {
 public:
  explicit TakeOut(RecomputedRun& run) : run_(run) {}
  void call_pack_hook(const at::Tensor& tensor) override { run_.fill(tensor); }
  at::Tensor call_unpack_hook() override {
    throw StateError(describe("recompute: a function", "runs a backward of its own in its second run",
                              "a forward only", "call backward() outside of the function"));
  }

 private:
  RecomputedRun& run_;
};

void RecomputedRun::run_again() {
  std::vector<at::Tensor> inputs;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    const Input& input = inputs_[i];
    if (version_of(input.tensor) != input.version)
      throw StateError(describe(fmt::format("recompute: input {}", i), "written after the forward",
                                "the values that the forward has used",
                                "pass a copy, or do not use operators in place on it"));
    inputs.push_back(input.tensor);
  }
  next_ = 0;
  {
    const ThreadMark mark(recomputing);
    const SavedTensorHooks hooks([this] { return std::make_unique<TakeOut>(*this); });
    try {
      state_->run([&] { function_(inputs); });
    } catch (const SecondRunIsDone&) {
    }
  }
  if (next_ != slots_.size())
    refuse_other_tensors(fmt::format("{}", next_), fmt::format("{}", slots_.size()));
  state_.reset();
  function_ = nullptr;
  inputs_.clear();
}

}  // namespace

void register_recomputed_state(std::function<RestoreState()> capture) {
  RegisteredStates& states = RegisteredStates::all();
  const std::lock_guard lock(states.mutex);
  states.captures.push_back(std::move(capture));
}

struct RecomputedPart::Impl {
  explicit Impl(const std::shared_ptr<RecomputedRun>& run)
      : mark(part_is_open), hooks([run] { return std::make_unique<LeaveOut>(run); }) {}

  ThreadMark mark;
  SavedTensorHooks hooks;
};

RecomputedPart::RecomputedPart(std::function<void(const std::vector<at::Tensor>&)> function,
                               const std::vector<at::Tensor>& inputs, const RecomputeOptions& options) {
  if (part_is_open || recomputing || !at::GradMode::is_enabled() || StepContext::current()->trial) return;
  impl_ = std::make_unique<Impl>(std::make_shared<RecomputedRun>(std::move(function), inputs, options));
}

RecomputedPart::~RecomputedPart() = default;

bool is_recomputing() { return recomputing; }

}  // namespace penstock
