#include "penstock/graph/run/separate_gradients.h"

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>

#include "penstock/graph/ir/byte_range.h"
#include "penstock/graph/ir/memory_groups.h"
#include "penstock/torch/tree/dense_layout.h"

namespace penstock::graph {
namespace {

class GradientMemory {
 public:
  GradientMemory(const Graph& backward, const BackwardRoles& roles, const std::vector<std::size_t>& deferred)
      : graph_(backward),
        roles_(roles),
        groups_(backward),
        is_tangent_(backward.values.size(), 0),
        made_late_(backward.values.size(), 0),
        read_late_(groups_.count(), 0) {
    for (std::size_t i = roles.saved; i < roles.saved + roles.tangents; ++i)
      is_tangent_[index_of(backward.inputs[i].value)] = 1;
    for (const std::size_t node : deferred) {
      for_each_value(backward.nodes[node].results, [&](ValueId value) { made_late_[index_of(value)] = 1; });
      for_each_value(backward.nodes[node].arguments,
                     [&](ValueId value) { read_late_[groups_.of(value)] = 1; });
    }
  }

  std::vector<std::size_t> shared() const {
    std::vector<std::size_t> shared, alone;
    for (std::size_t i = 0; i < roles_.tensor.size(); ++i) {
      if (graph_.outputs[i].value() == kNoValue || !may_be_kept(i)) continue;
      const bool overlaps =
          std::any_of(alone.begin(), alone.end(), [&](std::size_t other) { return may_overlap(i, other); });
      (overlaps || has_other_owners(i) ? shared : alone).push_back(i);
    }
    return shared;
  }

 private:
  bool in_subclass(std::size_t gradient) const { return roles_.is_subclass[roles_.tensor[gradient]] != 0; }

  // Autograd itself copies what has gaps or overlaps. It does not see the tensors inside of subclasses.
  bool may_be_kept(std::size_t gradient) const {
    const Geometry& geometry = graph_[graph_.outputs[gradient].value()].geometry;
    return in_subclass(gradient) || geometry.symbolic != kNotSymbolic ||
           is_dense(geometry.sizes, geometry.strides);
  }

  bool has_other_owners(std::size_t gradient) const {
    const ValueId value = graph_.outputs[gradient].value();
    const std::size_t group = groups_.of(value);
    const bool is_given =
        groups_.is_given(group) && (in_subclass(gradient) || is_tangent_[index_of(value)] == 0);
    return is_given || (read_late_[group] != 0 && made_late_[index_of(value)] == 0);
  }

  bool may_overlap(std::size_t one, std::size_t other) const {
    const ValueId a = graph_.outputs[one].value(), b = graph_.outputs[other].value();
    if (groups_.of(a) != groups_.of(b)) return false;
    if (a == b) return in_subclass(one) || in_subclass(other);
    const Geometry &of_a = graph_[a].geometry, &of_b = graph_[b].geometry;
    // Offsets are from the beginning of a storage, of which a group may have several.
    if (graph_[a].storage != graph_[b].storage || of_a.symbolic != kNotSymbolic ||
        of_b.symbolic != kNotSymbolic)
      return true;
    const ByteRange first = byte_range(of_a), second = byte_range(of_b);
    return first.first < second.end && second.first < first.end;
  }

  const Graph& graph_;
  const BackwardRoles& roles_;
  const MemoryGroups groups_;
  std::vector<char> is_tangent_, made_late_;  // by value
  std::vector<char> read_late_;               // by group
};

bool is_held_elsewhere(const at::Tensor& tensor) {
  return tensor.use_count() > 1 || (tensor.has_storage() && tensor.storage().use_count() > 1);
}

class Separating final : public CompiledGraph {
 public:
  Separating(std::shared_ptr<const CompiledGraph> inner, std::vector<std::size_t> gradients)
      : inner_(std::move(inner)), gradients_(std::move(gradients)) {}

  std::vector<c10::IValue> run(std::vector<at::Tensor> inputs, const BoundSizes* sizes) const override {
    std::vector<c10::IValue> results = inner_->run(std::move(inputs), sizes);
    for (const std::size_t gradient : gradients_) {
      if (!results[gradient].isTensor()) continue;
      // What is copied no longer holds the memory: the last one that has it keeps it.
      const at::Tensor& tensor = results[gradient].toTensor();
      if (tensor.defined() && is_held_elsewhere(tensor)) results[gradient] = tensor.clone();
    }
    return results;
  }

 private:
  std::shared_ptr<const CompiledGraph> inner_;
  std::vector<std::size_t> gradients_;
};

class SeparateGradients final : public GraphWrapper {
 public:
  explicit SeparateGradients(std::vector<std::size_t> gradients) : gradients_(std::move(gradients)) {}

  std::string_view name() const override { return "separate gradients"; }
  std::shared_ptr<const CompiledGraph> around(std::shared_ptr<const CompiledGraph> inner,
                                              GraphRole) const override {
    return std::make_shared<const Separating>(std::move(inner), gradients_);
  }

 private:
  std::vector<std::size_t> gradients_;
};

}  // namespace

std::vector<std::size_t> gradients_in_shared_memory(const Graph& backward, const BackwardRoles& roles,
                                                    const std::vector<std::size_t>& deferred) {
  return GradientMemory(backward, roles, deferred).shared();
}

GraphWrappers with_separate_gradients(GraphWrappers wrappers, std::vector<std::size_t> gradients) {
  if (!gradients.empty()) wrappers.push_back(std::make_shared<const SeparateGradients>(std::move(gradients)));
  return wrappers;
}

}  // namespace penstock::graph
