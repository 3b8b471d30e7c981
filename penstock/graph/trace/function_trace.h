// One run of a function in shape, recorded, with what autograd knows of it still at hand: what analysis and capture look at.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "penstock/graph/trace/analyze.h"
#include "penstock/graph/trace/capture.h"
#include "penstock/graph/trace/fake_in_place.h"
#include "penstock/graph/ir/subclass_record.h"
#include "penstock/graph/trace/tracer.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/fake.h"

namespace penstock::graph {

class FunctionTrace {
 public:
  // Whether inputs that are leaves and need a gradient are leaves inside, so that autograd refuses what it would refuse in earnest, or may
  // be written like results of something.
  enum class Leaves : std::uint8_t { AsTheyAre, Writable };

  FunctionTrace(const Function& function, const Values& inputs, const Convention& convention, Leaves leaves);

  static bool is_tensor(const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); }

  const std::vector<Geometry> before;       // of the inputs
  const OwnAutocastCache cast_weights;      // fake ones must not outlive the trace
  const FakeInPlace found;                  // held until everything below is gone
  FakeMode fake_mode;
  Tracer tracer;
  Values inputs, outputs;                   // of the function, fake
  std::vector<at::Tensor> primals;          // one for each tensor among the inputs: what gradients are taken of
  std::vector<FlattenRecord> records;        // of the primals: which inputs of the graph they are
  std::vector<std::vector<at::Tensor>> parts;   // for each input, the plain tensors in it as they were before the call
  std::vector<char> is_leaf;                // of the inputs, in earnest
  std::vector<char> is_leaf_with_grad;      // of the inputs, in earnest, before the call: a write may give one a gradient
  std::optional<bool> grad_mode_after;      // what the function left grad mode at, when it changed it

 private:
  void make_inputs(const Values& real_inputs, const Convention& convention, Leaves leaves);
};

// What analyze() and capture_joint() do with a trace. The second takes the trace's graph.
ViewAndMutationMeta analyze(FunctionTrace& trace, const AnalyzeOptions& options);
JointGraph capture_joint(FunctionTrace& trace, const ViewAndMutationMeta& meta);

}  // namespace penstock::graph
