// Options of graph::compile (compile.h): when to capture again, how to choose what backward keeps, and dims
// whose size a capture does not fix: one graph for all batch sizes or sequence lengths.
//
//   torch::nn::Sequential net(torch::nn::Linear(64, 64), torch::nn::ReLU());
//   auto fast = graph::compile(net, {.dynamic = {.dims = {{"args[0]", 0, "B"}, {"args[0]", 1, "T"}}}});
//   fast->forward(torch::randn({8, 128, 64}));     // captured
//   fast->forward(torch::randn({3, 77, 64}));      // replayed
//   std::cout << fast->graph_text();               // ... float32[B, T, 64] ...
//
// How it works. The function is captured, on fake tensors, at several sizes of each symbol. All captures must
// have the same operators; a number in which they differ (a size, a stride, an element of a list, a factor
// like 1/(B*T)) becomes an expression of the symbols. Sizes at which the function throws are skipped. Finally
// the function is captured at the sizes of the call, and the graph is compared with that capture.
//
// Correctness. A function may inspect sizes and behave differently for some of them, as LibTorch does for
// sizes 0 and 1. Therefore, the first time a set of sizes occurs, the graph is compared with a capture at
// exactly these sizes; this costs as much as capturing, once. If they differ, these sizes get a capture of
// their own, as without dynamic dims (CompileOptions::recapture), or a StateError that reports the
// difference. A function that cannot be captured for all sizes is captured for each, with a warning that
// gives the reason, or is a StateError.
//
// Limits: at most four symbols; an input with a dynamic dim must not overlap other inputs in memory; its
// strides are those of a dense tensor in the dim order of the first call, or fixed if it has gaps; parameters
// and buffers have no dynamic dims.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "penstock/value_wrapper.h"

namespace penstock::graph {

// An input of a captured function, by its position or by its name. Arguments of a module are "args[0]",
// "args[1]", or, nested, "args[1]['mask']".
class InputRef {
 public:
  InputRef(int place) : which_(static_cast<std::size_t>(place)) {}  // by position, from 0
  InputRef(std::size_t place) : which_(place) {}                    // by position
  InputRef(const char* name) : which_(std::string(name)) {}         // by name
  InputRef(std::string name) : which_(std::move(name)) {}           // by name
  // The position or the name.
  const std::variant<std::size_t, std::string>& get() const { return which_; }

 private:
  std::variant<std::size_t, std::string> which_;
};

// One dim of one input, whose size may differ from call to call.
struct DynamicDim {
  InputRef input;        // the input; it must be a tensor to matter
  std::int64_t dim = 0;  // negative: counted from the end
  // Dims with the same symbol have the same size; if empty, a new symbol: "s0", "s1", ...
  std::string symbol = {};
  // The graph is intended for sizes from min to max that are a multiple of multiple_of; other sizes are
  // captured separately, and the function is not tried at them. Entries for one symbol are combined: the
  // largest min, the smallest max, a common multiple.
  std::int64_t min = 0;
  std::int64_t max = std::numeric_limits<std::int64_t>::max();  // see min
  std::int64_t multiple_of = 1;                                 // see min
};

// Which dims are dynamic.
struct DynamicOptions {
  // Of tensor inputs; an entry is ignored in calls where that input is not a tensor.
  std::vector<DynamicDim> dims;
  // Asserts that the function does the same for all sizes: sizes larger than 1 are not checked when they
  // first occur.
  bool trust = false;
  // Gives each choice of sizes a capture of its own, as if `dims` were empty: to compare with fixed sizes.
  bool specialize = false;
};

// How the tensors that forward saves for backward are chosen.
enum class Partitioner : std::uint8_t {
  Default,  // saves every value that backward uses
  MinCut    // recomputes cheap values in backward where that saves memory
};

// What forward keeps for backward, and what backward recomputes instead (docs/memory.md): as little work as
// possible under a budget. Results have the same bits whatever is chosen.
struct ActivationOptions {
  // "1" saves all that backward uses, "0" recomputes all that can be recomputed, a fraction between keeps so
  // much of what "1" keeps; or bytes: "1.5 GiB". For one call that is to be differentiated; of captures for
  // all sizes at the sizes of the first call.
  std::string budget = "1";
  // Overrides by module, "blocks.*.attention: save" or "*: recompute": the first one that matches an
  // operator's module decides, where none does, the budget. A pattern matches a module and what is inside it;
  // in a component of the path, * stands for any characters, alone for everything.
  std::vector<std::string> policy = {};
  // The function is a part of the model that the patterns are meant for: they need not match any module of
  // it.
  bool part_of_model = false;

  // Whether anything may be recomputed: these options decide instead of CompileOptions::partitioner.
  bool decide() const { return budget != "1" || !policy.empty(); }
};

class Artifact;  // compile_artifact.h

// Where captures are kept between runs of a program (docs/compile_cache.md). A cache never makes a run fail:
// what cannot be read or written is compiled, with a warning.
struct CacheOptions {
  // Whether the cache folder is used.
  enum class Use : std::uint8_t {
    Environment,  // if PENSTOCK_CACHE names a folder
    On,           // unless PENSTOCK_CACHE is "off"
    Off
  };
  Use use = Use::Environment;  // whether the cache folder is used
  // Empty: PENSTOCK_CACHE, else $XDG_CACHE_HOME/penstock, else ~/.cache/penstock.
  std::string folder = {};
  // Names everything that decides what the function does besides its inputs and the program itself: the
  // configuration of the model, the place of this process. With an identity, a call that an earlier run of
  // the same program has compiled is loaded without running the function. Empty: every run captures, and
  // only what follows the capture is looked up.
  std::string identity = {};
  // Captures nevertheless, and throws StateError that names the difference if the entry describes another
  // function: to find what `identity` leaves out.
  bool verify = false;
  // Of the module, in messages and artifacts: "stage 0".
  std::string name = {};
  // Used instead of the cache folder: calls are written to it, or only loaded from it (compile_artifact.h).
  std::shared_ptr<Artifact> artifact = {};
  // How long to wait for another process that makes the same entry; the call is then compiled without the
  // cache, and the compiled function does not wait again. Never more than a third of PENSTOCK_TIMEOUT_S:
  // other ranks may be waiting for this one.
  std::chrono::milliseconds longest_wait = std::chrono::minutes(5);
};

// Computes the results of an operator by other ones. Takes one value for each argument of the schema, returns
// one tensor for each result.
using Decomposition = std::function<std::vector<at::Tensor>(const std::vector<c10::IValue>& arguments)>;

// When the backward half of a capture is compiled.
enum class CompileBackward : std::uint8_t {
  AtOnce,   // together with forward
  FirstUse  // in the first backward; a capture that is never differentiated saves the time
};

// What happens when the backward of a compiled call is differentiated (create_graph).
enum class SecondDerivatives : std::uint8_t {
  // The function itself runs again, on the inputs of the call, and is differentiated as usual. An input that
  // backward does not need is not kept alive for this; if nobody holds it any more, that is an error.
  RunAgain,
  RunAgainKeepingInputs,  // the same; every call holds all its inputs until its backward is released
  Refuse                  // NotImplemented; a call does not note its inputs
};

// The options of graph::compile.
struct CompileOptions {
  bool recapture = true;  // capture again for a different kind of call; false: throw StateError
  Partitioner partitioner = Partitioner::Default;  // what forward saves for backward
  // The same under a budget. graph::compile throws ValueError for malformed ones, and for a partitioner
  // besides them; the first call for a budget that cannot be met, which names the least one and the tensors
  // that need it, and for a pattern that matches no module.
  ActivationOptions activations = {};
  DynamicOptions dynamic = {};                                         // dims whose size is not fixed
  CacheOptions cache = {};                                             // what is kept between runs
  SecondDerivatives second_derivatives = SecondDerivatives::RunAgain;  // create_graph in backward
  CompileBackward compile_backward = CompileBackward::AtOnce;          // when backward is compiled
  // Backward consists of two graphs and two autograd nodes: the first one computes the gradients of the
  // arguments, the second one those gradients of parameters that can wait (docs/capture.md). A backward runs
  // one after the other, with the same bits as one graph; a pipeline whose schedule splits the backward
  // (ZBVZeroBubble, DualPipeV) runs the second one later.
  bool split_backward = false;
  // Operators ("aten::silu") that do not get into graphs: where one is called, in forward or backward, what
  // its decomposition calls is recorded. It must return what the operator returns; sizes and dtypes are
  // checked. For operators that write nothing and return new tensors; others are a ValueError.
  std::map<std::string, Decomposition> decompositions = {};
  // Names of the arguments of a module's forward, in order, for messages, graphs and InputRef: "mask" instead
  // of "args[1]". Arguments without one keep their numbers.
  std::vector<std::string> argument_names = {};
  // Refuses a function with backward that writes an input or parameter that requires a gradient (ValueError).
  bool joint_checks = false;
  // If set, receives one line for each capture: its number, size and time, and what made it necessary; and
  // one for each call that was loaded instead.
  std::function<void(const std::string& line)> log = {};
  // The compiler of the graphs, by its name (graph_compiler.h). graph::compile throws ValueError for a name
  // that is not registered.
  std::string compiler = "executor";
  std::string backward_compiler = {};   // of backward graphs; if empty, `compiler`
  std::string inference_compiler = {};  // of graphs without a backward; if empty, `compiler`
  // For compilers that generate code ("fused"). Only operators whose generated code has the bits of the
  // operators become part of it. Otherwise results differ by rounding (docs/fused.md states how much).
  bool compile_exact = false;
  // For compilers that generate code ("fused"). Each new kernel is compared once with the operators that it
  // stands for, on the inputs of its first call; if they differ, the operators run in its place, and a
  // warning names the folder with its source.
  bool compile_check = false;
  // The graph itself writes the inputs that the function writes, where autograd would not notice: only the
  // data changes, and no gradient is involved or the write is under no_grad. Otherwise, and always for tensor
  // subclasses and captures for all sizes, the graph returns new values, which are copied into the inputs
  // after it has run.
  bool keep_input_mutations = false;
  // Random operators of the graph take the states of their generators as arguments and return them: forward
  // and backward have an input and an output for each generator that they draw from, so that what a graph
  // computes depends on its inputs alone. A call passes the states of the process's generators and sets them
  // afterwards; the numbers are those of a plain run. While a graph runs, no other thread may draw from these
  // generators: its draws would be forgotten. Costs two copies of a state for each operator (5 KB on the
  // CPU).
  bool explicit_random_states = false;
  // Operators with side effects take a token and return it: forward and backward have a token among their
  // inputs and outputs for each effect (register_side_effect), so that the order of these operators follows
  // from the graph's values. Without tokens it is that of the nodes, which the library keeps and a compiler
  // has to keep.
  bool effect_tokens = false;
  // Passes that do not change the graphs (graph_pass.h lists them: graph_pass_names()). graph::compile throws
  // ValueError, which names the nearest, for a name that is not that of a pass.
  std::vector<std::string> disable_passes = {};
  // Checks the graph after each pass, as debug builds always do (InvariantError names the pass).
  bool verify_passes = false;
  // Your own wrappers of calls, outermost first, outside of those of the library.
  std::vector<std::shared_ptr<const ValueWrapper>> wrappers = {};
};

// Declares that an operator of the user ("mine::send") has an effect besides its results: in a captured graph
// it runs exactly once and in order, whether or not its results are used. `effect` names what is ordered:
// with CompileOptions::effect_tokens operators of different effects have different tokens, so that a compiler
// may exchange them. Collectives are "ordered". Call it before the first capture. Throws ValueError for an
// empty effect, or one with brackets. Thread safety: any thread.
void register_side_effect(const std::string& op, const std::string& effect = "ordered");

}  // namespace penstock::graph
