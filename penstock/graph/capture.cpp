#include "penstock/graph/capture.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <string>
#include <unordered_map>

#include "penstock/base/errors.h"
#include "penstock/graph/fake_in_place.h"
#include "penstock/graph/fake_inputs.h"
#include "penstock/graph/tracer.h"
#include "penstock/torch/fake.h"

namespace penstock::graph {
namespace {

bool holds_tensor(const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); }

// A fake tensor that stands where a gradient of a result will stand: dense, in the order of the result's strides.
at::Tensor fake_tangent(const Geometry& geometry) {
  return make_fake_strided(geometry.sizes, geometry.strides, at::dtype(geometry.dtype).device(geometry.device));
}

class JointCapture {
 public:
  JointCapture(const Values& inputs, const ViewAndMutationMeta& meta, const Convention& convention)
      : real_inputs_(inputs), meta_(meta), convention_(convention), found_(found_tensors(inputs, convention)) {
    if (inputs.size() != meta.inputs.size())
      throw ValueError(describe("graph: number of inputs", std::to_string(inputs.size()), std::to_string(meta.inputs.size()),
                                "analyze the function with the inputs it is captured with"));
  }

  JointGraph run(const Function& function) {
    make_primals();
    const ModeGuard below(fake_mode_);
    const ModeGuard on(tracer_);
    {
      const c10::AutoGradMode restore(c10::GradMode::is_enabled());
      outputs_ = function(inputs_);
    }
    if (outputs_.size() != meta_.outputs.size())
      throw StateError(describe("graph: number of results of the captured function", std::to_string(outputs_.size()),
                                std::to_string(meta_.outputs.size()) + " as when it was analyzed",
                                "make the function do the same on every call"));
    collect_bases();
    return_forward();
    differentiate();
    result_.graph = std::move(tracer_.graph);
    verify(result_.graph);
    return std::move(result_);
  }

 private:
  void make_primals() {
    std::unordered_map<const c10::TensorImpl*, at::Tensor> made;
    for (std::size_t i = 0; i < real_inputs_.size(); ++i) {
      if (!holds_tensor(real_inputs_[i])) {
        inputs_.push_back(real_inputs_[i]);
        continue;
      }
      const at::Tensor& real = real_inputs_[i].toTensor();
      ++result_.primals;
      std::string name = i < convention_.names.size() ? convention_.names[i] : fmt::format("primals_{}", result_.primals);
      const at::Tensor primal = tracer_.add_input(i < convention_.found ? real : to_fake(real), std::move(name));
      primals_.push_back(primal);
      if (i < convention_.found) {
        made[real.unsafeGetTensorImpl()] = primal;
        inputs_.emplace_back(primal);
        continue;
      }
      // The same tensor again is the same tensor inside, as it is for the function: the first place gets all of the gradient.
      at::Tensor& input = made[real.unsafeGetTensorImpl()];
      // Not a leaf, so that the function may write it; what autograd refuses on leaves the analysis has found.
      if (!input.defined()) input = primal.requires_grad() ? non_leaf_of(primal) : primal;
      inputs_.emplace_back(input);
    }
  }

  void collect_bases() {
    bases_.resize(meta_.intermediate_bases);
    for (std::size_t i = 0; i < outputs_.size(); ++i)
      if (meta_.outputs[i].kind == OutputKind::AliasOfIntermediateSaveAsOutput)
        bases_[*meta_.outputs[i].base_index] = at::Tensor(outputs_[i].toTensor()._base());
  }

  void return_forward() {
    std::vector<Operand>& returned = tracer_.graph.outputs;
    for (const std::size_t i : meta_.mutated_at_run_time()) returned.push_back(tracer_.operand_of(inputs_[i]));
    for (std::size_t i = 0; i < outputs_.size(); ++i)
      returned.push_back(is_fresh(meta_.outputs[i].kind) ? tracer_.operand_of(outputs_[i]) : Operand::of(kNoValue));
    for (const at::Tensor& base : bases_) returned.push_back(tracer_.operand_of(base));
    result_.forward_outputs = returned.size();
  }

  const at::Tensor& result_of(const TangentInfo& tangent) const {
    switch (tangent.kind) {
      case TangentInfo::Kind::MutatedInput: return inputs_[tangent.index].toTensor();
      case TangentInfo::Kind::Output: return outputs_[tangent.index].toTensor();
      case TangentInfo::Kind::IntermediateBase: return bases_[tangent.index];
    }
    throw InvariantError("graph: a tangent of unknown kind");
  }

  void differentiate() {
    torch::autograd::variable_list roots, tangents, leaves;
    for (const TangentInfo& tangent : meta_.tangents) {
      const at::Tensor& result = result_of(tangent);
      // The same tensor returned twice has one gradient.
      bool again = false;
      for (const at::Tensor& root : roots) again |= root.is_same(result);
      if (again) continue;
      PENSTOCK_INVARIANT(result.requires_grad(), "a result that needed a gradient when the function was analyzed needs none now");
      roots.push_back(result);
      tangents.push_back(tracer_.add_input(fake_tangent(tangent.geometry), fmt::format("tangents_{}", tangents.size() + 1)));
      result_.tangents.push_back(tangent);
    }
    for (const at::Tensor& primal : primals_)
      if (primal.requires_grad()) leaves.push_back(primal);
    torch::autograd::variable_list gradients(leaves.size());
    tracer_.phase = Phase::Backward;
    if (!roots.empty() && !leaves.empty())
      gradients = torch::autograd::grad(roots, leaves, tangents, /*retain_graph=*/c10::nullopt, /*create_graph=*/false, /*allow_unused=*/true);
    std::size_t next = 0;
    for (const at::Tensor& primal : primals_) {
      const at::Tensor gradient = primal.requires_grad() ? gradients[next++] : at::Tensor();
      tracer_.graph.outputs.push_back(gradient.defined() ? Operand::of(tracer_.value_of(gradient)) : Operand::of(kNoValue));
    }
  }

  const Values& real_inputs_;
  const ViewAndMutationMeta& meta_;
  const Convention& convention_;
  const FakeInPlace found_;
  FakeMode fake_mode_;
  Tracer tracer_;
  Values inputs_, outputs_;
  std::vector<at::Tensor> primals_, bases_;
  JointGraph result_;
};

}  // namespace

Graph capture_forward(const Function& function, const Values& inputs) {
  FakeMode fake_mode;
  Tracer tracer;
  Values fakes;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    fakes.push_back(holds_tensor(inputs[i]) ? c10::IValue(tracer.add_input(to_fake(inputs[i].toTensor().detach()), fmt::format("input{}", i)))
                                            : inputs[i]);
  const c10::AutoGradMode no_gradients(false);
  const ModeGuard below(fake_mode);
  const ModeGuard on(tracer);
  for (const c10::IValue& output : function(fakes)) tracer.graph.outputs.push_back(tracer.operand_of(output));
  verify(tracer.graph);
  return std::move(tracer.graph);
}

JointGraph capture_joint(const Function& function, const Values& inputs, const ViewAndMutationMeta& meta, const Convention& convention) {
  return JointCapture(inputs, meta, convention).run(function);
}

}  // namespace penstock::graph
