// What forward keeps for backward and what backward recomputes, as text and as a picture over the step:
// `penstock inspect memory` and `penstock inspect graph`.
//
//   const ActivationReport report(joint, {.budget = "0.3"});
//   fmt::print("{}{}", report.saving_text(), report.peak_text());
//   write(page, report.to_html("model tiny"));
//
// Memory is that of one call, parameters and inputs not counted, as the executor plans it (step_memory.h);
// what kernels allocate for themselves meanwhile is not known.
// Thread safety: that of a standard container.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "penstock/graph/run/step_memory.h"

namespace penstock::graph {

class ActivationReport {
 public:
  // The joint graph must outlive the report. Throws what plan_activations() throws.
  ActivationReport(const JointGraph& joint, const ActivationOptions& options);

  const ActivationPlan& plan() const { return plan_; }
  const StepMemory& step() const { return step_; }

  // What is saved and recomputed, what that brings and costs, and a table by module and operator.
  std::string saving_text() const;
  // The peak, also if everything were saved, and what is live then, largest first.
  std::string peak_text(std::size_t rows = 12) const;
  // A page with the memory of the step, stacked tensor by tensor: the horizontal axis is the operators of
  // forward, then of backward. A pointer on a tensor shows its operator, module and bytes. A single file that
  // loads nothing.
  std::string to_html(const std::string& title) const;

  // Of a tensor of the step: "aten::mm in blocks.0.feed.up".
  std::string name_of(const StepTensor& tensor) const;

 private:
  const JointGraph& joint_;
  ActivationPlan plan_;
  StepMemory step_;
  std::int64_t peak_of_saving_all_ = 0;
  std::vector<std::string> modules_;  // by node of the joint graph
  std::vector<std::size_t> maker_;    // by value: its node, or the number of nodes
};

// "saved", "recomputed", ...
std::string_view to_text(StepTensor::Kind kind);

}  // namespace penstock::graph
