#include "penstock/graph/run/compiled.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "penstock/base/warnings.h"
#include "penstock/errors.h"
#include "penstock/graph/run/call_store.h"
#include "penstock/graph/run/compiled_call.h"
#include "penstock/graph/run/generalize.h"
#include "penstock/graph/run/graph_passes.h"
#include "penstock/graph/wrap/user_wrapper.h"

namespace penstock::graph {
namespace {

std::chrono::microseconds time_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin);
}

double in_ms(std::chrono::microseconds time) { return 1e-3 * static_cast<double>(time.count()); }

// Why a capture is not valid for a call.
std::string difference_of(CompiledCall& call, const Values& inputs) {
  const CallGuard& guard = call.capture().guard;
  if (!call.dynamic()) return guard.difference(inputs);
  std::string why;
  const auto sizes = call.dynamic()->bind(inputs, &why);
  return why.empty() ? guard.difference(inputs, sizes.get(), &call.dynamic()->table()) : why;
}

const std::string& either(const std::string& name, const std::string& otherwise) {
  return name.empty() ? otherwise : name;
}

// A parameter is to be changed by an optimizer, not by forward.
void check_joint(const FunctionCapture& capture, const Convention& convention) {
  if (capture.joint.tangents.empty()) return;
  const ViewAndMutationMeta& meta = capture.user_meta();
  for (std::size_t i = 0; i < meta.inputs.size(); ++i)
    if (meta.inputs[i].requires_grad && meta.inputs[i].mutation_type() != MutationType::NotMutated)
      throw ValueError(fmt::format(
          "graph: {}, which requires a gradient, is written in a function with backward; write only "
          "what requires none, or switch joint_checks off",
          convention.name_of(i)));
}

}  // namespace

void check_compilers(const CompileOptions& options) {
  graph_compiler(options.compiler);
  graph_compiler(either(options.backward_compiler, options.compiler));
  graph_compiler(either(options.inference_compiler, options.compiler));
  check_disabled_passes(options.disable_passes);
  check_split(SplitOptions(options));
}

struct Compiled::Refused {
  CallGuard kind;
  std::string why;
};

struct Compiled::Lookup {
  Lookup(CallStore& store, const Values& inputs, const Convention& convention, CallStore::Sizes sizes)
      : begin(Clock::now()), guard(inputs, convention), place(store.find(guard, sizes, inputs)) {}
  Clock::time_point begin;
  CallGuard guard;
  CallStore::Place place;
};

Compiled::Compiled(Function function, const CompileOptions& options, Convention convention,
                   FunctionIdentity identity)
    : function_(std::move(function)),
      options_(options),
      convention_(std::move(convention)),
      wrappers_(call_wrappers_with(options.wrappers)),
      check_(identity.check),
      check_run_(identity.check_run),
      forward_compiler_(graph_compiler(options.compiler)),
      backward_compiler_(graph_compiler(either(options.backward_compiler, options.compiler))),
      inference_compiler_(graph_compiler(either(options.inference_compiler, options.compiler))),
      passes_(std::make_shared<const PassList>(options.disable_passes, options.verify_passes)) {
  if (!options_.decompositions.empty())
    convention_.decompositions = std::make_shared<const DecompositionTable>(options_.decompositions);
  if (!options_.wrappers.empty() && !options_.dynamic.dims.empty())
    throw ValueError(fmt::format(
        "graph: wrapper '{}' and dynamic dims cannot be combined, since a capture for all sizes knows "
        "nothing of what it does to sizes; leave one of them out",
        options_.wrappers[0]->name()));
  store_ = CallStore::open(options_, std::move(identity), compilers(), passes_->text());
}
Compiled::~Compiled() = default;
Compiled::Compiled(Compiled&&) noexcept = default;
Compiled& Compiled::operator=(Compiled&&) noexcept = default;

Values Compiled::run(const CompiledCall& call, const Values& inputs, const CallSizes& sizes) const {
  if (check_run_) check_run_(call.capture());
  return call.run(inputs, sizes);
}

Values Compiled::operator()(const Values& inputs) {
  // Most recent first: sizes with a capture of their own were captured after the one for all sizes.
  for (auto it = calls_.rbegin(); it != calls_.rend(); ++it) {
    CompiledCall& call = **it;
    const CallGuard& guard = call.capture().guard;
    if (!call.dynamic()) {
      if (guard.holds(inputs)) return run(call, inputs);
      continue;
    }
    const auto sizes = call.dynamic()->bind(inputs);
    if (!sizes || !guard.holds(inputs, sizes.get())) continue;
    return call.dynamic()->needs_check(*sizes) ? check_and_run(call, inputs, sizes)
                                               : run(call, inputs, sizes);
  }
  if (!calls_.empty() && !options_.recapture)
    throw StateError(fmt::format(
        "graph: the capture is not valid for this call: {}; call it as it was captured, or set recapture",
        difference_of(*calls_.back(), inputs)));
  return capture(inputs);
}

void Compiled::prepare(const Values& inputs) {
  for (const auto& call : calls_) {
    const auto sizes = call->dynamic() ? call->dynamic()->bind(inputs) : CallSizes();
    if ((sizes || !call->dynamic()) && call->capture().guard.holds(inputs, sizes.get())) return;
  }
  if (!captures_for_all_sizes() || !capture_dynamic(inputs)) capture_fixed(inputs);
}

Values Compiled::check_and_run(CompiledCall& call, const Values& inputs,
                               const c10::intrusive_ptr<BoundSizes>& sizes) {
  if (store_ && store_->only_loads())
    throw StateError(
        fmt::format("graph: the artifact was not compiled for {}; compile it with a call of these sizes, or "
                    "set dynamic.trust if the function does the same for all sizes",
                    call.dynamic()->table().text_of(sizes->values)));
  const auto begin = Clock::now();
  FunctionCapture fixed =
      with_explicit_states(capture_function(function_, inputs, convention_), explicit_states());
  const std::string difference = difference_at(call.capture(), fixed, *sizes);
  if (difference.empty()) {
    call.dynamic()->mark_checked(*sizes);
    keep_checked(call);
    return run(call, inputs, sizes);
  }
  if (!options_.recapture)
    throw StateError(
        fmt::format("graph: the capture for all sizes is not valid for {}: there {}; call it with other "
                    "sizes, or set recapture",
                    call.dynamic()->table().text_of(sizes->values), difference));
  if (check_) check_(fixed, inputs);
  return run(add(std::move(fixed), difference, begin), inputs);
}

CompilerChoice Compiled::compilers() const {
  return CompilerChoice(forward_compiler_, backward_compiler_, inference_compiler_);
}

CompiledCall& Compiled::add(FunctionCapture capture, const std::string& why, Clock::time_point begin) {
  const auto start = Clock::now();
  if (options_.joint_checks) check_joint(capture, convention_);
  capture.second_derivatives = options_.second_derivatives;
  PassLog passes;
  run_passes_on_joint(capture, *passes_, &passes);
  const auto split = [&](FunctionCapture whole) {
    return graph::partition(std::move(whole), SplitOptions(options_), *passes_, &passes);
  };
  CallStore::Halves halves;
  if (store_)
    halves = store_->halves_of(std::move(capture), split);
  else
    halves.capture = split(std::move(capture));
  calls_.push_back(
      std::make_unique<CompiledCall>(std::move(halves.capture), compilers(),
                                     CompiledCallOptions{.trust_sizes = options_.dynamic.trust,
                                                         .compile_backward = options_.compile_backward,
                                                         .code = std::move(halves.code),
                                                         .exact = options_.compile_exact,
                                                         .check = options_.compile_check}));
  made_in_.push_back(time_since(begin));
  if (store_) store_->keep_halves(halves, *calls_.back());
  if (options_.log) {
    const CompiledCall& call = *calls_.back();
    options_.log(fmt::format(
        "graph: capture {}{}: {} nodes, {} in forward, {} in backward{}, {} bytes saved, compiled in {:.1f} "
        "ms{}{}{}{}",
        calls_.size(), call.dynamic() ? " for all sizes" : "", call.capture().joint.graph.nodes.size(),
        call.halves().forward.nodes.size(), call.halves().backward.nodes.size(),
        options_.split_backward ? fmt::format(" ({} for parameters later)", call.halves().deferred.size())
                                : std::string(),
        call.halves().saved_bytes(call.capture().joint.graph), in_ms(time_since(start)),
        why.empty() ? "" : "; ", why, passes.text().empty() ? "" : "; passes: ", passes.text()));
  }
  return *calls_.back();
}

std::string Compiled::why_captured(const Values& inputs) const {
  if (!options_.log || calls_.empty()) return {};
  return difference_of(*calls_.back(), inputs);
}

ExplicitStates Compiled::explicit_states() const {
  return {.effects = options_.effect_tokens, .random_numbers = options_.explicit_random_states};
}

FunctionCapture Compiled::capture_as_called(const Values& inputs) const {
  return with_explicit_states(
      capture_function(function_, inputs, convention_, wrappers_, options_.keep_input_mutations),
      explicit_states());
}

CompiledCall* Compiled::load(Lookup& lookup, const Values& inputs) {
  if (!lookup.place.call) return nullptr;
  StoredCall& stored = *lookup.place.call;
  stored.capture.capture.set_function(function_);
  if (store_->verifies() && stored.capture.capture.symbols.empty()) {
    FunctionCapture now = capture_as_called(inputs);
    now.second_derivatives = options_.second_derivatives;
    run_passes_on_joint(now, *passes_, nullptr);
    store_->verify(stored.capture,
                   graph::partition(std::move(now), SplitOptions(options_), *passes_, nullptr));
  }
  auto call =
      std::make_unique<CompiledCall>(std::move(stored.capture), compilers(),
                                     CompiledCallOptions{.trust_sizes = options_.dynamic.trust,
                                                         .compile_backward = options_.compile_backward,
                                                         .code = std::move(stored.code),
                                                         .exact = options_.compile_exact,
                                                         .check = options_.compile_check});
  if (call->dynamic()) {
    // The entry is for one kind of call: not for all sizes of it.
    const auto sizes = call->dynamic()->bind(inputs);
    if (!sizes || !call->capture().guard.holds(inputs, sizes.get())) return nullptr;
    if (!store_->verifies()) call->dynamic()->set_checked_sizes(stored.checked_sizes);
  } else if (!call->capture().guard.holds(inputs)) {
    return nullptr;
  }
  ++loaded_;
  calls_.push_back(std::move(call));
  made_in_.push_back(stored.made_in);
  if (options_.log)
    options_.log(fmt::format(
        "graph: capture {} was loaded: {} nodes in {:.1f} ms, which were captured and compiled in "
        "{:.1f} ms",
        calls_.size(), calls_.back()->capture().joint.graph.nodes.size(), in_ms(time_since(lookup.begin)),
        in_ms(stored.made_in)));
  return calls_.back().get();
}

CompiledCall* Compiled::capture_fixed(const Values& inputs) {
  std::optional<Lookup> lookup;
  if (store_) {
    lookup.emplace(*store_, inputs, convention_, CallStore::Sizes::Fixed);
    if (CompiledCall* call = load(*lookup, inputs)) return call;
  }
  const std::string why = why_captured(inputs);
  const auto begin = Clock::now();
  FunctionCapture capture = capture_as_called(inputs);
  if (check_) check_(capture, inputs);
  if (store_) store_->inspect(lookup->place, capture);
  CompiledCall& call = add(std::move(capture), why, begin);
  if (store_) store_->keep(lookup->place, call, made_in_.back());
  return &call;
}

Values Compiled::capture(const Values& inputs) {
  if (captures_for_all_sizes())
    if (CompiledCall* call = capture_dynamic(inputs)) {
      const auto sizes = call->dynamic()->bind(inputs);
      return call->dynamic()->needs_check(*sizes) ? check_and_run(*call, inputs, sizes)
                                                  : run(*call, inputs, sizes);
    }
  return run(*capture_fixed(inputs), inputs);
}

void Compiled::keep_checked(const CompiledCall& call) {
  const auto kept = dynamic_kept_.find(&call);
  if (kept != dynamic_kept_.end()) store_->keep_again(kept->second.key, call, kept->second.made_in);
}

CompiledCall* Compiled::capture_dynamic(const Values& inputs) {
  std::vector<DynamicSymbol> symbols = symbols_of(options_.dynamic, inputs, convention_);
  if (symbols.empty()) return nullptr;
  const auto refuse = [&](const std::string& why) {
    if (!options_.recapture)
      throw StateError(
          fmt::format("graph: the function cannot be captured for all sizes: {}; change it, mark other dims, "
                      "or set recapture",
                      why));
  };
  // Sizes outside the requested range say nothing about the others; neither does a tensor without elements,
  // which has no dim order.
  const SymbolValues sizes = sizes_of(symbols, inputs);
  for (std::size_t i = 0; i < symbols.size(); ++i)
    if (!symbols[i].allows(sizes[i]) || sizes[i] == 0) {
      refuse(fmt::format("{} is {} in the first call, expected {}", symbols[i].name, sizes[i],
                         symbols[i].allows(sizes[i]) ? "1 or more" : symbols[i].range_text()));
      return nullptr;
    }
  for (const Refused& refused : refused_)
    if (refused.kind.same_kind(inputs)) return nullptr;
  // Neither do sizes for which an existing graph with symbols cannot be evaluated.
  for (const auto& call : calls_)
    if (call->dynamic() && call->capture().guard.same_kind(inputs) && !call->dynamic()->bind(inputs))
      return nullptr;
  std::optional<Lookup> lookup;
  if (store_) {
    lookup.emplace(*store_, inputs, convention_, CallStore::Sizes::Dynamic);
    CompiledCall* call = load(*lookup, inputs);
    if (call) dynamic_kept_.emplace(call, Kept{lookup->place.key, made_in_.back()});
    if (call || store_->only_loads()) return call;
  }
  const auto begin = Clock::now();
  Generalized all = capture_for_all_sizes(function_, inputs, convention_, std::move(symbols));
  if (all.capture) {
    all.capture = with_explicit_states(std::move(*all.capture), explicit_states());
    DynamicCall call(all.capture->symbols, all.capture->joint.graph.table, options_.dynamic.trust);
    const auto bound = call.bind(inputs, &all.refused);
    if (bound) all.refused = all.capture->guard.difference(inputs, bound.get(), &call.table());
    if (all.refused.empty()) {
      const std::string why = why_captured(inputs);
      if (check_) check_(*all.capture, inputs);
      if (!lookup) return &add(std::move(*all.capture), why, begin);
      store_->inspect(lookup->place, *all.capture);
      CompiledCall& call = add(std::move(*all.capture), why, begin);
      if (lookup->place.keeps && lookup->place.refused.empty())
        dynamic_kept_.emplace(&call, Kept{lookup->place.key, made_in_.back()});
      store_->keep(lookup->place, call, made_in_.back());
      return &call;
    }
  }
  refuse(all.refused);
  warn("graph",
       fmt::format("dynamic dims: the function is captured separately for each size: {}", all.refused));
  refused_.push_back({CallGuard(inputs, convention_), std::move(all.refused)});
  return nullptr;
}

const ViewAndMutationMeta& Compiled::meta(std::size_t capture) const {
  return calls_.at(capture)->capture().user_meta();
}
const ViewAndMutationMeta& Compiled::inner_meta(std::size_t capture) const {
  return calls_.at(capture)->capture().meta;
}
const JointGraph& Compiled::joint(std::size_t capture) const { return calls_.at(capture)->capture().joint; }
const Partition& Compiled::partition(std::size_t capture) const { return calls_.at(capture)->halves(); }
std::vector<std::string> Compiled::wrappers(std::size_t capture) const {
  return calls_.at(capture)->wrappers();
}
std::vector<std::string> Compiled::wrapper_decisions(std::size_t capture) const {
  return calls_.at(capture)->wrapper_decisions();
}
CacheCounts Compiled::cache_counts() const { return store_ ? store_->counts() : CacheCounts(); }
bool Compiled::is_dynamic(std::size_t capture) const { return calls_.at(capture)->dynamic().has_value(); }
std::size_t Compiled::checked_sizes(std::size_t capture) const {
  const CompiledCall& call = *calls_.at(capture);
  return call.dynamic() ? call.dynamic()->checked() : 0;
}
std::string Compiled::why_not_dynamic() const {
  return refused_.empty() ? std::string() : refused_.back().why;
}

}  // namespace penstock::graph
