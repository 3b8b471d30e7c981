// Cuts a model that is a list of layers into stages of a pipeline: a torch::nn::ModuleList, a
// torch::nn::Sequential, a model that has one of these, or a vector of modules.
//
//   torch::nn::ModuleList blocks(torch::nn::Linear(16, 16), torch::nn::Linear(16, 16));
//   LayerList layers = LayerList::of<torch::nn::LinearImpl>(blocks.ptr());
//   auto parts = plan::partition_by_cost(layers.parameter_counts(), 2);
//   torch::nn::Linear head(16, 4);
//   LayerStage last(layers, parts, 1, {.embed = {}, .head = StageModule(head)});
//   PipelineStage second = last.pipeline_stage(at::kCPU);
//   last.bind_head(StageModule(torch::nn::Linear(16, 4)));  // another module in its place
//
// Layers are referenced, never copied: a stage trains the parameters of the model that it was cut from. An
// embedding is on the first stage only, a head on the last one only, whatever the other ranks pass.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/partition.h"
#include "penstock/stage.h"
#include "penstock/stage_module.h"

namespace penstock {

namespace detail {

// Finds a typed form of a layer; std::nullopt: it is none of the kinds.
using TypedLayer = std::optional<StageModule> (*)(const std::shared_ptr<torch::nn::Module>& layer);

template <class... Kinds>
std::optional<StageModule> typed_layer(const std::shared_ptr<torch::nn::Module>& layer) {
  std::optional<StageModule> found;
  [[maybe_unused]] const auto try_kind = [&]<class Kind>(std::type_identity<Kind>) {
    if (found) return;
    if (auto typed = std::dynamic_pointer_cast<Kind>(layer)) found.emplace(std::move(typed));
  };
  (try_kind(std::type_identity<Kinds>{}), ...);
  return found;
}

}  // namespace detail

// The layers of a model in order. A value: copies refer to the same layers.
class LayerList {
 public:
  // Layers whose types are known. Throws ValueError if there are none.
  explicit LayerList(std::vector<StageModule> layers);

  // Layers of a torch::nn::ModuleList or torch::nn::Sequential: `source` itself, or its submodule of this
  // name ("transformer.h"). `Kinds` are the module types of the layers, because a list does not know how to
  // call them; a torch::nn::Sequential does, for layers that take and return tensors. Throws ValueError for
  // any other source, an empty list, and a layer of another kind, which it names.
  template <class... Kinds>
  static LayerList of(const std::shared_ptr<torch::nn::Module>& source, const std::string& name = "layers") {
    return from_module(source, name, &detail::typed_layer<Kinds...>);
  }

  // Number of layers.
  std::size_t size() const { return layers_.size(); }
  // A layer; the index must be less than size().
  const StageModule& operator[](std::size_t index) const { return layers_[index]; }
  // Returns the number of elements of the parameters of each layer, as costs for plan::partition_by_cost.
  std::vector<double> parameter_counts() const;

 private:
  static LayerList from_module(const std::shared_ptr<torch::nn::Module>& source, const std::string& name,
                               detail::TypedLayer typed);
  std::vector<StageModule> layers_;
};

// What a model has besides its layers.
struct ModelEnds {
  std::optional<StageModule> embed = {};  // before the first layer
  std::optional<StageModule> head = {};   // after the last layer
};

// One stage of a model: a contiguous part of its layers, and its ends.
class LayerStage {
 public:
  // `parts` are the layers of all stages, `index` is the stage. Throws ValueError if the parts are not
  // contiguous and complete, for an index outside of them, and for a stage without anything to compute.
  LayerStage(const LayerList& layers, const std::vector<plan::LayerRange>& parts, int index,
             const ModelEnds& ends = {});

  // Position in the whole pipeline.
  int index() const { return index_; }
  // Number of stages of the whole pipeline.
  int count() const { return count_; }
  // The embedding, the layers and the head as one chain, which passes a tuple or list from one to the next as
  // several arguments.
  const StageModule& module() const { return *module_; }
  // A module whose submodules are those of this stage, under "embed", "layers.<index in the whole model>" and
  // "head": for fully_shard, parallelize_module, named_parameters and checkpoints.
  const std::shared_ptr<torch::nn::Module>& slice() const { return slice_; }
  // Moves the modules to the device and returns a stage of a pipeline.
  PipelineStage pipeline_stage(at::Device device, StageOptions options = {}) const;

  // Replaces the head by another module, such as the one that tensor parallelism made of it: stages made
  // before and after compute with it, and slice() and parameters() have its parameters. Optimizers must be
  // made afterwards. Returns false and does nothing on a stage without a head.
  bool bind_head(const StageModule& head);

 private:
  struct Slot;
  int index_ = 0;
  int count_ = 0;
  std::shared_ptr<torch::nn::Module> slice_;
  std::shared_ptr<Slot> head_;
  std::optional<StageModule> module_;
};

}  // namespace penstock
