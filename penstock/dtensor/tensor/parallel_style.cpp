#include "penstock/tensor_parallel.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/dtensor/tensor/dtensor_payload.h"
#include "penstock/errors.h"
#include "penstock/torch/dispatch/any_operator_hook.h"

namespace penstock {
namespace {

using detail::DTensorPayload;

Placements on_axis(const StyleTarget& target, const Placement& placement) {
  Placements placements(target.mesh.shape().size());
  placements[static_cast<std::size_t>(target.axis)] = placement;
  return placements;
}

void replicate_parameters(torch::nn::Module& module, const comm::MeshGroups& mesh, bool recurse) {
  const Placements whole(mesh.shape().size());
  for (const at::Tensor& parameter : module.parameters(recurse))
    if (parameter.defined() && !is_dtensor(parameter)) distribute_parameter(parameter, mesh, whole);
  for (const at::Tensor& buffer : module.buffers(recurse))
    if (buffer.defined() && !is_dtensor(buffer)) distribute_parameter(buffer, mesh, whole);
}

[[noreturn]] void refuse(const StyleTarget& target, std::string_view style, std::string_view known) {
  throw TypeError(describe(fmt::format("{} on module '{}'", style, target.name), target.module.name(), known,
                           "apply it to the modules inside, or write a ParallelStyle for it"));
}

// Returns the parameter that the module's operator uses as its weight; undefined for other modules.
at::Tensor weight_of(torch::nn::Module& module) {
  if (auto* linear = module.as<torch::nn::LinearImpl>()) return linear->weight;
  if (auto* embedding = module.as<torch::nn::EmbeddingImpl>()) return embedding->weight;
  if (auto* norm = module.as<torch::nn::LayerNormImpl>()) return norm->weight;
  return {};
}

class Colwise final : public ParallelStyle {
 public:
  explicit Colwise(const ColwiseOptions& options) : options_(options) {}
  void apply(const StyleTarget& target) const override {
    at::Tensor bias;
    if (auto* linear = target.module.as<torch::nn::LinearImpl>()) {
      distribute_parameter(linear->weight, target.mesh, on_axis(target, Shard{0}));
      if (linear->bias.defined()) distribute_parameter(linear->bias, target.mesh, on_axis(target, Shard{0}));
      bias = linear->bias;
    } else if (auto* embedding = target.module.as<torch::nn::EmbeddingImpl>()) {
      distribute_parameter(embedding->weight, target.mesh, on_axis(target, Shard{1}));
    } else {
      refuse(target, "colwise_parallel", "torch::nn::Linear or torch::nn::Embedding");
    }
    // Otherwise an operator might find it cheaper to gather the weight; the requested layout is guaranteed.
    const ModuleBoundary boundary{target.mesh,
                                  target.axis,
                                  options_.input,
                                  options_.desired_input,
                                  options_.output.value_or(Placement(Shard{-1})),
                                  options_.kind};
    set_boundary(weight_of(target.module), boundary);
    if (bias.defined()) set_boundary(bias, boundary);
  }

 private:
  const ColwiseOptions options_;
};

class Rowwise final : public ParallelStyle {
 public:
  explicit Rowwise(const RowwiseOptions& options) : options_(options) {}
  void apply(const StyleTarget& target) const override {
    if (auto* linear = target.module.as<torch::nn::LinearImpl>()) {
      distribute_parameter(linear->weight, target.mesh, on_axis(target, Shard{1}));
      if (linear->bias.defined())
        distribute_parameter(linear->bias, target.mesh, on_axis(target, Replicate{}));
      const ModuleBoundary boundary{target.mesh, target.axis,     options_.input,
                                    Shard{-1},   options_.output, options_.kind};
      set_boundary(linear->weight, boundary);
      if (linear->bias.defined()) set_boundary(linear->bias, boundary);
    } else if (auto* embedding = target.module.as<torch::nn::EmbeddingImpl>()) {
      distribute_parameter(embedding->weight, target.mesh, on_axis(target, Shard{0}));
      set_boundary(embedding->weight,
                   {target.mesh, target.axis, Replicate{}, Replicate{}, options_.output, options_.kind});
    } else {
      refuse(target, "rowwise_parallel", "torch::nn::Linear or torch::nn::Embedding");
    }
  }

 private:
  const RowwiseOptions options_;
};

class Sequence final : public ParallelStyle {
 public:
  explicit Sequence(const SequenceOptions& options) : options_(options) {}
  void apply(const StyleTarget& target) const override {
    replicate_parameters(target.module, target.mesh, true);
    if (auto* norm = target.module.as<torch::nn::LayerNormImpl>()) {
      if (!norm->weight.defined())
        throw TypeError(describe(fmt::format("sequence_parallel on module '{}'", target.name),
                                 "a LayerNorm without weight", "one with elementwise_affine(true)",
                                 "call prepare_layout on its input instead"));
      set_boundary(norm->weight,
                   {target.mesh, target.axis, Shard{options_.dim}, Shard{options_.dim}, {}, options_.kind});
    }
  }

 private:
  const SequenceOptions options_;
};

class Prepare final : public ParallelStyle {
 public:
  explicit Prepare(const PrepareOptions& options) : options_(options) {}
  void apply(const StyleTarget& target) const override {
    const at::Tensor weight = weight_of(target.module);
    if (!weight.defined())
      throw TypeError(describe(fmt::format("prepare_module on module '{}'", target.name),
                               target.module.name(), "Linear, Embedding or LayerNorm with a weight",
                               "call prepare_layout in the code that calls the module"));
    replicate_parameters(target.module, target.mesh, true);
    ModuleBoundary boundary{target.mesh,     target.axis,  options_.plain_input, options_.desired_input,
                            options_.output, options_.kind};
    set_boundary(weight, boundary);
    if (auto* linear = target.module.as<torch::nn::LinearImpl>(); linear && linear->bias.defined()) {
      // Rows of the output are placed like those of the input, and the bias is added to them.
      if (!boundary.output)
        boundary.output = boundary.desired_input ? boundary.desired_input : boundary.plain_input;
      set_boundary(linear->bias, boundary);
    }
  }

 private:
  const PrepareOptions options_;
};

// Both have the same number of parts, and each part matches.
bool matches(const std::string& pattern, const std::string& name) {
  if (pattern.empty() || name.empty()) return pattern == name;
  if (std::count(pattern.begin(), pattern.end(), '.') != std::count(name.begin(), name.end(), '.'))
    return false;
  // FNM_PATHNAME keeps * within one part of a path.
  std::string path = pattern, subject = name;
  std::replace(path.begin(), path.end(), '.', '/');
  std::replace(subject.begin(), subject.end(), '.', '/');
  return fnmatch(path.c_str(), subject.c_str(), FNM_PATHNAME) == 0;
}

}  // namespace

ParallelStylePtr colwise_parallel(const ColwiseOptions& options) {
  return std::make_shared<Colwise>(options);
}
ParallelStylePtr rowwise_parallel(const RowwiseOptions& options) {
  return std::make_shared<Rowwise>(options);
}
ParallelStylePtr sequence_parallel(const SequenceOptions& options) {
  return std::make_shared<Sequence>(options);
}
ParallelStylePtr prepare_module(const PrepareOptions& options) { return std::make_shared<Prepare>(options); }

void parallelize_module(torch::nn::Module& module, const comm::MeshGroups& mesh,
                        const std::vector<std::pair<std::string, ParallelStylePtr>>& plan,
                        const ParallelizeOptions& options) {
  int axis = 0;
  if (!options.axis.empty())
    axis = mesh.mesh().axis(options.axis);
  else if (mesh.shape().size() != 1)
    throw ValueError(describe("parallelize_module: axis", "none",
                              fmt::format("the name of an axis of {}", mesh.mesh().to_string()),
                              "set ParallelizeOptions::axis"));
  std::vector<std::pair<std::string, torch::nn::Module*>> modules{{"", &module}};
  for (const auto& item : module.named_children()) {
    modules.emplace_back(item.key(), item.value().get());
    for (const auto& inner : item.value()->named_modules(item.key(), false))
      modules.emplace_back(inner.key(), inner.value().get());
  }
  // Find everything before changing anything.
  std::vector<std::pair<ParallelStylePtr, std::pair<std::string, torch::nn::Module*>>> found;
  for (const auto& [pattern, style] : plan) {
    if (!style) throw ValueError(fmt::format("parallelize_module: the style of '{}' is null", pattern));
    const std::size_t before = found.size();
    for (const auto& candidate : modules)
      if (matches(pattern, candidate.first)) found.emplace_back(style, candidate);
    if (found.size() == before) {
      std::vector<std::string> names;
      for (std::size_t i = 1; i < std::min<std::size_t>(modules.size(), 20); ++i)
        names.push_back(modules[i].first);
      throw ValueError(
          describe("parallelize_module: pattern", fmt::format("'{}', which matches no module", pattern),
                   fmt::format("one of {}{}", fmt::join(names, ", "), modules.size() > 20 ? ", ..." : "")));
    }
  }
  for (const auto& [style, candidate] : found) style->apply({*candidate.second, candidate.first, mesh, axis});
}

void distribute_module(torch::nn::Module& module, const comm::MeshGroups& mesh) {
  replicate_parameters(module, mesh, true);
}

void distribute_parameter(const at::Tensor& parameter, const comm::MeshGroups& mesh,
                          const Placements& placements) {
  if (is_dtensor(parameter)) {
    const DTensorPayload& payload = *detail::dtensor_payload(parameter);
    if (payload.mesh == mesh && payload.spec == payload.spec->with_placements(placements)) return;
    throw StateError(describe("distribute_parameter: a parameter that is already distributed",
                              describe_dtensor(parameter),
                              fmt::format("{} on {}", to_string(placements), mesh.mesh().to_string()),
                              "parameters that modules share must have the same layout"));
  }
  const bool requires_grad = parameter.requires_grad();
  at::Tensor distributed = distribute_tensor(parameter.detach(), mesh, placements);
  const Placements home = placements_of(distributed);
  replace_data(parameter, distributed);
  if (!requires_grad) return;
  // A parameter that is watched (any_operator_hook.h) is sharded further, and that code reduces its gradients
  // from the layout they arrive in.
  const c10::weak_intrusive_ptr<c10::TensorImpl> handle(parameter.getIntrusivePtr());
  parameter.register_hook([home, handle](const at::Tensor& gradient) {
    const auto impl = handle.lock();
    const bool watched = impl && is_marked_for_any_hook(at::Tensor(impl));
    return is_dtensor(gradient) && !watched ? redistribute(gradient, home) : gradient;
  });
}

}  // namespace penstock
