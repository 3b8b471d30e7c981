// Cuts one module into the stages of a pipeline, without changing it: the forward is traced once, on fake
// tensors, and cut at modules, at marks, or into a number of stages of equal cost.
//
//   Pipe pipe = trace_pipeline(model, Tree::tuple({x}), {}, PipeSplit::at({{"blocks.1",
//   SplitPoint::Before}})); std::cout << pipe.to_text();                                // who feeds whom
//   PipelineStage stage = build_stage(pipe, world.rank(), at::kCPU);
//   PipelineOptions options{world};
//   options.skips = pipe.skips();
//   options.info = pipe.info();
//   Schedule1F1B pipeline(stage, 8, mse_loss, options);         // any schedule
//
// The example is one microbatch. Tensors of other sizes need an example of their own (TraceOptions::more).
// Every value of the forward may be used anywhere later: a value that several stages use travels from one to
// the next, and its gradients are added on the way back, in the order of one backward through the whole
// model. Positional arguments may be used anywhere: the first stage, which gets them, passes them on. Keyword
// arguments are passed to `step` on the ranks whose stages use them (Pipe::keywords). Values that are not
// tensors are those of the example, and compared with them. The last stage returns what the module returns.
//
// Each stage owns exactly the parameters and buffers that its part of the forward uses, under their names in
// the model; a checkpoint of the stages is one of the model, and the other way round. Those that nothing uses
// belong to the stage in which their module runs. A parameter that several stages use becomes a tie
// (Pipe::ties, shared_parameters.h).
//
// The records of all tensors between stages come from the trace: no stage makes a trial run.
//
// What a trace fixes: control flow, the values of plain arguments and settings (the probability of a
// Dropout), sizes, autocast and the default dtype. Training and evaluation are traced both. A forward that
// depends on values is a DataDependentError, one that computes with numbers of the running step (the loss
// scale, for example) a StateError. Random keys and the rows of this replica (StepContext::key and box_of)
// are those of each step. User-defined autograd functions keep their backward. Trace a model of plain
// tensors: distributed ones are refused.
//
// Thread safety: a Pipe is immutable and may be read by any thread; tracing and building use the module.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "penstock/fake.h"
#include "penstock/graph.h"
#include "penstock/group.h"
#include "penstock/module_scope.h"
#include "penstock/pipeline.h"
#include "penstock/pytree.h"
#include "penstock/shared_parameters.h"
#include "penstock/stage.h"
#include "penstock/stage_module.h"

namespace penstock {

// Where a stage ends: before the first operator of a module, or after its last one.
enum class SplitPoint : std::uint8_t { Before, After };

// A split at a module.
struct SplitAt {
  std::string module;                     // its name in named_modules(): "blocks.1"
  SplitPoint point = SplitPoint::Before;  // before or after it
};

// How a forward is cut.
class PipeSplit {
 public:
  // At these modules, in any order.
  static PipeSplit at(std::vector<SplitAt> splits) { return PipeSplit(std::move(splits)); }
  // Into this many stages: balanced by an estimate of costs, and with few bytes between stages.
  static PipeSplit into(int stages) { return PipeSplit(stages); }
  // At the calls of pipe_split() in the forward.
  static PipeSplit at_marks() { return PipeSplit(Marks{}); }

 private:
  friend struct PipeTracer;
  struct Marks {};
  using How = std::variant<std::vector<SplitAt>, int, Marks>;
  explicit PipeSplit(How how) : how_(std::move(how)) {}
  How how_;
};

// The arguments of a forward.
struct PipeExample {
  Tree args;    // a tuple
  Tree kwargs;  // a dictionary, or None
};

// Options of trace_pipeline.
struct TraceOptions {
  // Further examples, of other sizes: of a smaller last microbatch, for example. Each is cut at the same
  // places.
  std::vector<PipeExample> more = {};
  // Whether the forward is also traced with all modules in evaluation mode, if some are in training mode.
  bool evaluation = true;
  // For PipeSplit::into: how much more than necessary the most expensive stage may cost if fewer bytes are
  // sent.
  double tolerance = 0.05;
  // Where parameters without memory (on the meta device, or fake) are during the trace.
  at::Device device = at::kCPU;
};

// A node of the graph of a pipe: who feeds whom.
struct PipeNode {
  // What it is.
  enum class Kind : std::uint8_t {
    Argument,  // an argument of the forward
    Stage,     // the call of a stage
    Item,      // one result of a stage
    Output     // what the forward returns
  };
  Kind kind = Kind::Argument;       // what it is
  std::string name;                 // "args[0]", "stage_1", "stage_1[0]", "output"
  std::vector<std::size_t> inputs;  // nodes that it takes, in order: all come before it
  int stage = -1;                   // of a Stage and its items
  std::size_t index = 0;            // of an Item: which result of the stage
  std::string record;               // of a tensor: "float32[4, 8]"
  std::string module;               // of an Item: the module that made it
};

// The graph of a pipe as a value.
struct PipeGraph {
  std::vector<PipeNode> nodes;  // in order; the last one is the Output

  // Returns the index of the stage that this node calls. Throws PipeliningMetadataError for any other name.
  int stage_of(std::string_view name) const;
  // Returns the nodes that take the result of a node.
  std::vector<std::size_t> users(std::size_t node) const;
  // Throws PipeliningMetadataError, naming the line, if there are not `stages` stages in order, if an input
  // of a stage is neither an argument nor a result of an earlier stage, an item is of something that is not a
  // stage, two items are the same, or there is not exactly one output.
  void verify(int stages) const;
  // Returns one line for each node.
  std::string to_text() const;
  // Returns the graph for Graphviz.
  std::string to_dot() const;
};

// What travels from one stage to the next one, in one microbatch. A value that skips stages crosses several
// borders, and is sent once.
struct PipeBorder {
  int from = 0;              // the stage before
  int to = 0;                // the stage after
  std::int64_t tensors = 0;  // how many
  std::int64_t bytes = 0;    // their elements
};

// Internal.
struct PipeState;

// A traced module, cut into stages. A handle: copies share the trace, and hold the parameters of the module.
class Pipe {
 public:
  // Number of stages.
  int stages() const;
  // Who feeds whom.
  const PipeGraph& outer() const;
  // Returns outer() as text, with the size of each stage.
  std::string to_text() const;
  // Returns the operators of a stage as a graph: parameters, buffers and keyword arguments first, then what
  // other stages send. Throws ValueError for a stage that does not exist, here and below.
  graph::Graph stage_graph(int stage) const;
  // Returns the operators of a stage, one in each line, with the module of each.
  std::string stage_text(int stage) const;

  // Names of the parameters of a stage, in the order of the model.
  std::vector<std::string> parameter_names(int stage) const;
  // Names of the buffers of a stage.
  std::vector<std::string> buffer_names(int stage) const;
  // Names of the keyword arguments that a stage uses, or by which it tells two examples apart.
  std::vector<std::string> keywords(int stage) const;
  // Parameters that several stages use, for SharedParameters.
  std::vector<ParameterTie> ties() const;
  // Tensors that go past stages, for PipelineOptions::skips. `copies`: 2 for a bidirectional schedule.
  std::vector<SkipTensor> skips(int copies = 1) const;
  // What is sent between stages, each pair once.
  std::vector<PipeBorder> borders() const;
  // For PipelineOptions::info, so that a schedule for another number of stages is refused. `training`: false
  // for a pipeline without a loss.
  PipeInfo info(bool training = true) const;

  // [collective over the group] Throws PipeliningMetadataError on every rank if ranks have traced different
  // models, or cut them differently.
  void check_equal(const comm::Group& group) const;

 private:
  friend struct PipeTracer;
  friend const PipeState& state_of(const Pipe& pipe);
  explicit Pipe(std::shared_ptr<const PipeState> state) : state_(std::move(state)) {}
  std::shared_ptr<const PipeState> state_;
};

// Traces a module and cuts it. `args` is a tuple or list, `kwargs` a dictionary or None. Parameters and
// buffers are fake during the trace, and unchanged afterwards; nothing is computed.
//
// Throws ValueError that names module and operator for a split at a module that does not exist (with the
// nearest name) or does not run, for stages without operators, for splits through a chain of in-place
// operators, and for more stages than there are places; DataDependentError for a forward that depends on
// values; StateError for one that computes with numbers of the running step; TypeError for distributed
// tensors; NotImplemented for autograd functions that write their arguments, for gradient hooks that the
// forward sets, and for a tensor that gets other values and keeps its history (set_data).
Pipe trace_pipeline(const StageModule& module, const Tree& args, const Tree& kwargs, const PipeSplit& split,
                    const TraceOptions& options = {});

// Options of build_stage.
struct BuildStageOptions {
  // Of the stage. Examples are those of the trace unless given.
  StageOptions stage = {};
  // Called for each parameter and buffer without memory once it has some, before anything uses it: to fill
  // it. If empty, its values are undefined until they are set or loaded.
  std::function<void(const std::string& name, at::Tensor& tensor)> initialize = {};
  // Gives fake parameters and buffers the values that the module was built with under this mode (fake.h).
  // Used during the call only.
  DeferredInit* deferred = nullptr;
  // 2: of a bidirectional schedule. Stage `stages() + i` is then the second copy of stage i, with memory of
  // its own.
  int copies = 1;
  // [collective over the group] If given, checks that all its ranks have the same pipe.
  std::optional<comm::Group> group = {};
};

// Returns the module of a stage: with its parameters and buffers on the device, under their names in the
// model, in submodules with the names of the model's. The parameters are those of the traced module itself,
// moved to the device; a parameter that an earlier stage uses too is a leaf of its own.
//
// Its forward throws ValueError for tensors of sizes without an example, for plain values that differ from
// the example, for missing keyword arguments, in a mode that was not traced, under another autocast or
// default dtype than the trace, and if requires_grad_(true) after the trace would lose a gradient. Throws
// ValueError if an operator of the trace has no kernel on this kind of device.
StageModule stage_module(const Pipe& pipe, int index, at::Device device,
                         const BuildStageOptions& options = {});

// Returns a stage for any schedule: stage_module() with the examples of the trace. Throws ValueError for a
// stage that does not exist, and what BuildStageOptions::initialize throws.
PipelineStage build_stage(const Pipe& pipe, int index, at::Device device,
                          const BuildStageOptions& options = {});

}  // namespace penstock
