// A function that runs as a graph: captured on its first call, replayed after that, with the same results as
// the function itself.
//
//   Compiled step(function);
//   Values results = step({x, w});         // captured: analyzed, functionalized, split in two
//   results[0].toTensor().sum().backward();
//   step({x2, w2});                        // replayed
//
// Inputs that the function mutates are mutated, outputs that are inputs or views of inputs are reproduced as
// such, and gradients flow as through the function: all of forward is one autograd node, and views and
// mutations of inputs are done outside of it.
//
// A capture is valid for inputs of the same sizes, strides, offsets, dtypes, devices and requires_grad, which
// alias each other in the same way, under the same grad mode, with the same non-tensor values; for tensor
// subclasses (a DTensor) also of the same kind, context (mesh, placements) and inner geometry. Any other call
// captures again, or with `recapture = false` throws a StateError that reports the difference. Dims can be
// marked as dynamic; one capture is then valid for all their sizes (compile_options.h).
// Subclasses are flattened: the graph operates on the plain tensors inside (subclass_record.h), and results
// and gradients are rebuilt.
// Backward can run once unless the graph is retained, as usual. Differentiating it again (create_graph) runs
// the function itself again (CompileOptions::second_derivatives). Modifying a saved tensor before backward is
// an error, as usual. Random numbers are drawn from the default generators, in the order of the function;
// with CompileOptions::explicit_random_states their states are inputs and outputs of the graph. Thread
// safety: calls of one object must not overlap; backward may run on any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "penstock/compile_options.h"
#include "penstock/graph/cache/directory_cache.h"
#include "penstock/graph/partition/partition.h"
#include "penstock/graph/run/function_identity.h"
#include "penstock/graph/trace/analyze.h"
#include "penstock/graph/trace/capture.h"
#include "penstock/graph/wrap/call_wrapper.h"

namespace penstock::graph {

class CallStore;
class CompiledCall;
class GraphCompiler;
class PassList;
struct CompilerChoice;
struct ExplicitStates;
struct FunctionCapture;
struct BoundSizes;

// Throws ValueError for a compiler or a pass that is not registered.
void check_compilers(const CompileOptions& options);

class Compiled {
 public:
  // `identity` matters if something is kept between runs (CacheOptions). Throws ValueError for a compiler
  // that is not registered.
  explicit Compiled(Function function, const CompileOptions& options = {}, Convention convention = {},
                    FunctionIdentity identity = {});
  ~Compiled();
  Compiled(Compiled&&) noexcept;
  Compiled& operator=(Compiled&&) noexcept;

  Values operator()(const Values& inputs);
  // Makes a call with these inputs ready without running it: nothing is computed.
  void prepare(const Values& inputs);

  // What the cache did so far; zeros without one.
  CacheCounts cache_counts() const;
  // The number of calls that were loaded, so that the function was not captured.
  std::size_t loaded() const { return loaded_; }
  // How long it took to capture and compile a call; for one that was loaded, when its entry was made.
  std::chrono::microseconds made_in(std::size_t capture) const { return made_in_.at(capture); }

  // One capture for each kind of call so far; the most recent is last.
  std::size_t captures() const { return calls_.size(); }
  const ViewAndMutationMeta& meta(std::size_t capture) const;  // of the function as called
  // After removing duplicates and merging overlapping inputs.
  const ViewAndMutationMeta& inner_meta(std::size_t capture) const;
  const JointGraph& joint(std::size_t capture) const;  // without writes
  const Partition& partition(std::size_t capture) const;
  // The names of the wrappers around its graphs, outermost first.
  std::vector<std::string> wrappers(std::size_t capture) const;
  // One line for each of them: "duplicate inputs: input 1 is input 0".
  std::vector<std::string> wrapper_decisions(std::size_t capture) const;

  // For dynamic dims: whether a capture is valid for all sizes, at how many sizes it was compared, and why
  // the most recent kind of call without such a capture could not get one (empty if there is none).
  bool is_dynamic(std::size_t capture) const;
  std::size_t checked_sizes(std::size_t capture) const;
  std::string why_not_dynamic() const;

 private:
  struct Refused;  // a kind of call that is captured for each of its sizes, and the reason
  Values run(const CompiledCall& call, const Values& inputs, const CallSizes& sizes = {}) const;
  Values capture(const Values& inputs);
  FunctionCapture capture_as_called(const Values& inputs) const;
  ExplicitStates explicit_states() const;
  CompilerChoice compilers() const;
  bool captures_for_all_sizes() const {
    return !options_.dynamic.dims.empty() && !options_.dynamic.specialize;
  }
  using Clock = std::chrono::steady_clock;
  // Splits and compiles a capture, which was begun then. `why`: what made it necessary, for the log.
  CompiledCall& add(FunctionCapture capture, const std::string& why, Clock::time_point begin);
  std::string why_captured(const Values& inputs) const;
  struct Lookup;  // of a kind of call in the store
  // Returns the stored call, which is added, or null.
  CompiledCall* load(Lookup& lookup, const Values& inputs);
  CompiledCall* capture_fixed(const Values& inputs);
  void keep_checked(const CompiledCall& call);
  // Captures for all sizes. Returns null if that is not possible.
  CompiledCall* capture_dynamic(const Values& inputs);
  Values check_and_run(CompiledCall& call, const Values& inputs, const c10::intrusive_ptr<BoundSizes>& sizes);

  Function function_;
  CompileOptions options_;
  Convention convention_;
  CallWrappers wrappers_;
  std::function<void(const FunctionCapture&, const Values&)> check_;  // of new captures; may be empty
  std::function<void(const FunctionCapture&)> check_run_;             // of each run; may be empty
  std::shared_ptr<const GraphCompiler> forward_compiler_, backward_compiler_, inference_compiler_;
  std::shared_ptr<const PassList> passes_;
  std::unique_ptr<CallStore> store_;  // null if nothing is kept between runs
  std::vector<std::unique_ptr<CompiledCall>> calls_;
  std::vector<std::chrono::microseconds> made_in_;  // by call
  std::size_t loaded_ = 0;
  struct Kept {
    CacheKey key;
    std::chrono::microseconds made_in;
  };
  std::map<const CompiledCall*, Kept> dynamic_kept_;  // the calls for all sizes that are kept
  std::vector<Refused> refused_;
};

}  // namespace penstock::graph
