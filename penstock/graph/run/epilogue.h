// What happens after the graph has run: inputs are written, and results that are inputs, or views of inputs
// or of other results, are made, outside of the autograd node, as the function did it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/graph/run/function_capture.h"

namespace penstock::graph {

class Epilogue final : public AppliedWrapper, public std::enable_shared_from_this<Epilogue> {
 public:
  explicit Epilogue(const FunctionCapture& capture);

  std::string_view name() const override { return "epilogue"; }
  std::string decision() const override;
  // `inner` returns one value for each of meta.forward_returns().
  Call around(Call inner, const ViewAndMutationMeta& meta) const override;
  bool same_but_for_sizes(const AppliedWrapper& other) const override;

 private:
  void write_inputs(const Values& inputs, const Values& returned, const ViewAndMutationMeta& meta,
                    const BoundSizes* sizes) const;
  Values make_outputs(const Values& inputs, const Values& returned, const ViewAndMutationMeta& meta,
                      const BoundSizes* sizes) const;

  std::vector<std::size_t> mutated_;      // inputs, in the order of the values returned
  std::vector<Geometry> geometry_after_;  // of these
  std::vector<std::optional<std::size_t>> memory_after_;
  std::vector<Operand> constants_;  // the results that are not tensors; by result
};

}  // namespace penstock::graph
