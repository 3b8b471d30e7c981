// One recorded run of a function on fake tensors, with its autograd graph still available, for analysis and
// capture.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "penstock/fake.h"
#include "penstock/graph/ir/subclass_record.h"
#include "penstock/graph/trace/analyze.h"
#include "penstock/graph/trace/capture.h"
#include "penstock/graph/trace/fake_in_place.h"
#include "penstock/graph/trace/tracer.h"
#include "penstock/torch/dispatch/autocast_scope.h"

namespace penstock::graph {

class FunctionTrace {
 public:
  // Whether inputs that are leaves and require a gradient stay leaves, so that autograd rejects what it would
  // reject in a real run, or become writable like results of a computation.
  enum class Leaves : std::uint8_t { AsTheyAre, Writable };

  FunctionTrace(const Function& function, const Values& inputs, const Convention& convention, Leaves leaves);

  static bool is_tensor(const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); }

  const std::vector<Geometry> before;   // of the inputs
  const OwnAutocastCache cast_weights;  // fake ones must not outlive the trace
  const FakeInPlace found;              // destroyed after everything below
  FakeMode fake_mode;
  Tracer tracer;
  Values inputs, outputs;  // of the function, fake
  // One for each tensor among the inputs; gradients are taken with respect to these.
  std::vector<at::Tensor> primals;
  std::vector<FlattenRecord> records;                 // of the primals: which inputs of the graph they are
  std::vector<std::vector<at::Tensor>> parts;         // for each input, its plain tensors before the call
  std::vector<std::vector<StorageId>> memory_before;  // of these; set_ gives a tensor other memory
  std::vector<char> is_leaf;                          // of the inputs, in the real call
  // Of the inputs, in the real call, before it: a write may give one a gradient.
  std::vector<char> is_leaf_with_grad;
  std::optional<bool> grad_mode_after;  // the grad mode after the function, if it changed it

 private:
  void make_inputs(const Values& real_inputs, const Convention& convention, Leaves leaves);
};

// The implementations of analyze() and capture_joint() for a trace. The latter moves the graph out of the
// trace.
ViewAndMutationMeta analyze(FunctionTrace& trace, const AnalyzeOptions& options);
JointGraph capture_joint(FunctionTrace& trace, const ViewAndMutationMeta& meta);

}  // namespace penstock::graph
