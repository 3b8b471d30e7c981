// Wrappers around a captured function: each replaces it by a simpler one before it is captured, and turns a
// call of the simpler one back into a call of the original.
//
//   FunctionForm form(function, inputs);
//   std::vector<WrapperInUse> used = apply(default_call_wrappers(), form);   // in order; changes the form
//   ... capture and compile form.function() ...
//   Call call = wrap(compiled, used);            // in reverse order
//   Values results = call(inputs, {});
//
// The graph then needs to handle only what wrappers leave over: tensors that are passed once, overlap no
// other in memory, and are no lazy conjugates. A wrapper that has nothing to do for a call is not in use and
// costs nothing.
//
// Wrappers inside autograd, which act on forward and backward separately: graph_wrapper.h.
// Your own: derive from CallWrapper and AppliedWrapper, and insert it into the list. A wrapper in use is kept
// between runs as its name and what it has decided (save, load), and is applied again: it is not stored
// itself.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/graph/ir/symbolic_table.h"
#include "penstock/graph/wrap/function_form.h"

namespace penstock::graph {

class GraphEncoder;
class GraphDecoder;

// The sizes of dynamic dims in a call; null if all sizes are fixed.
using CallSizes = c10::intrusive_ptr<BoundSizes>;
using Call = std::function<Values(const Values& inputs, const CallSizes& sizes)>;

// What a wrapper has decided for one capture. Immutable.
class AppliedWrapper {
 public:
  virtual ~AppliedWrapper() = default;
  virtual std::string_view name() const = 0;
  // What was decided, on one line: "input 1 is input 0". Inputs are those that the wrapper was applied to.
  virtual std::string decision() const { return {}; }
  // Turns a call of the function that the wrapper made into a call of the function that it was applied to,
  // which `outer` describes.
  virtual Call around(Call inner, const ViewAndMutationMeta& outer) const = 0;
  // The function that the wrapper made of the one that it was applied to, which takes the inputs of the inner
  // call. The default is for wrappers that leave the function alone.
  virtual Function inner_function(Function function) const { return function; }
  // Whether the same was decided for another call of the same kind, regardless of sizes.
  virtual bool same_but_for_sizes(const AppliedWrapper& other) const = 0;
  // Writes what CallWrapper::load needs to make this again in another process. The default throws
  // NotImplemented: captures with this wrapper are then not kept between runs.
  virtual void save(GraphEncoder& encoder) const;
};

class CallWrapper {
 public:
  virtual ~CallWrapper() = default;
  virtual std::string_view name() const = 0;
  // Replaces the function and its inputs by simpler ones. Returns null, and leaves the form unchanged, if
  // there is nothing to do. Throws NotImplemented, naming inputs, for what it cannot handle.
  virtual std::shared_ptr<const AppliedWrapper> apply(FunctionForm& form) const = 0;
  // Reads what AppliedWrapper::save has written for a call with this many inputs. Calls decoder.fail() for
  // anything that it would not have written: indices must be checked. The default throws NotImplemented.
  virtual std::shared_ptr<const AppliedWrapper> load(GraphDecoder& decoder, std::size_t inputs) const;
};

using CallWrappers = std::vector<std::shared_ptr<const CallWrapper>>;
// Duplicate inputs, synthetic bases, lazy inputs.
const CallWrappers& default_call_wrappers();

// A wrapper in use, and what the function did that it was applied to.
struct WrapperInUse {
  std::shared_ptr<const AppliedWrapper> wrapper;
  ViewAndMutationMeta outer;
};
std::vector<WrapperInUse> apply(const CallWrappers& wrappers, FunctionForm& form);
Call wrap(Call inner, const std::vector<WrapperInUse>& used);

}  // namespace penstock::graph
