#include "penstock/layer_list.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/modules/container/any.h>

#include <tuple>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {

namespace {

using ModulePointer = std::shared_ptr<torch::nn::Module>;

// What a layer of a Sequential returned.
Tree tree_of(torch::nn::AnyValue value) {
  using at::Tensor;
  if (const auto* one = value.try_get<Tensor>()) return Tree(*one);
  if (const auto* several = value.try_get<std::vector<Tensor>>()) return Tree(*several);
  if (const auto* two = value.try_get<std::tuple<Tensor, Tensor>>()) return Tree(*two);
  if (const auto* three = value.try_get<std::tuple<Tensor, Tensor, Tensor>>()) return Tree(*three);
  throw ValueError(describe("result of a layer of a torch::nn::Sequential",
                            c10::demangle(value.type_info().name()),
                            "a tensor, a vector of tensors, or a tuple of two or three",
                            "name the type of the layer as a template argument of LayerList::of"));
}

// AnyModule is the only thing that knows how to call a layer of a Sequential.
StageModule erased_layer(torch::nn::AnyModule layer) {
  StageModule::Modules modules{layer.ptr()};
  return StageModule(
      [layer](const Tree& args, const Tree& kwargs) mutable {
        if (kwargs.size() > 0) detail::refuse_kwargs(kwargs);
        const auto x = [&](std::size_t i) -> at::Tensor { return args[i].tensor(); };
        switch (args.size()) {
          case 1:
            return tree_of(layer.any_forward(x(0)));
          case 2:
            return tree_of(layer.any_forward(x(0), x(1)));
          case 3:
            return tree_of(layer.any_forward(x(0), x(1), x(2)));
          default:
            throw ValueError(describe("arguments of a layer of a torch::nn::Sequential",
                                      fmt::format("{}", args.size()), "one to three tensors",
                                      "name the type of the layer as a template argument of LayerList::of"));
        }
      },
      std::move(modules));
}

ModulePointer find_list(const ModulePointer& source, const std::string& name) {
  const auto is_list = [](const ModulePointer& module) {
    return std::dynamic_pointer_cast<torch::nn::ModuleListImpl>(module) != nullptr ||
           std::dynamic_pointer_cast<torch::nn::SequentialImpl>(module) != nullptr;
  };
  if (source == nullptr)
    throw ValueError(describe("layers of a model", "no module", "a list of modules, or a model with one"));
  if (is_list(source)) return source;
  const auto submodules = source->named_modules(/*name_prefix=*/"", /*include_self=*/false);
  const ModulePointer* found = submodules.find(name);
  if (found == nullptr || !is_list(*found))
    throw ValueError(describe(
        fmt::format("layers of a {}", source->name()),
        found == nullptr ? fmt::format("no submodule {}", name)
                         : fmt::format("its submodule {}, a {}", name, (*found)->name()),
        fmt::format("a torch::nn::ModuleList or torch::nn::Sequential, or a model that has one as {}", name),
        "pass the name of the list, or a vector of StageModules"));
  return *found;
}

// Registers what a slot computes with; the modules of a function are numbered.
ModulePointer module_of(const StageModule& module) {
  if (module.modules().size() == 1) return module.modules().front();
  auto several = std::make_shared<torch::nn::Module>("modules");
  for (std::size_t i = 0; i < module.modules().size(); ++i)
    several->register_module(std::to_string(i), module.modules()[i]);
  return several;
}

void check_parts(const std::vector<plan::LayerRange>& parts, std::size_t layers, int index) {
  int next = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].begin != next || parts[i].end < parts[i].begin)
      throw ValueError(describe(fmt::format("layers of stage {}", i),
                                fmt::format("{} to {}", parts[i].begin, parts[i].end - 1),
                                fmt::format("a range that begins with layer {}", next),
                                "use the partition functions of partition.h"));
    next = parts[i].end;
  }
  if (static_cast<std::size_t>(next) != layers)
    throw ValueError(describe("layers of all stages", fmt::format("{}", next),
                              fmt::format("the {} layers of the model, each once", layers),
                              "partition exactly the layers of the list"));
  if (index < 0 || static_cast<std::size_t>(index) >= parts.size())
    throw ValueError(describe("stage of a partition", fmt::format("{}", index),
                              fmt::format("0 to {}", static_cast<int>(parts.size()) - 1)));
}

}  // namespace

LayerList::LayerList(std::vector<StageModule> layers) : layers_(std::move(layers)) {
  if (layers_.empty())
    throw ValueError(describe("layers of a model", "none", "at least one", "pass a list that has layers"));
}

LayerList LayerList::from_module(const std::shared_ptr<torch::nn::Module>& source, const std::string& name,
                                 TypedLayer typed) {
  const ModulePointer list = find_list(source, name);
  std::vector<StageModule> layers;
  if (const auto sequential = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(list)) {
    for (const torch::nn::AnyModule& layer : *sequential) {
      std::optional<StageModule> known = typed(layer.ptr());
      layers.push_back(known ? *known : erased_layer(layer));
    }
  } else {
    for (const ModulePointer& layer : *std::dynamic_pointer_cast<torch::nn::ModuleListImpl>(list)) {
      std::optional<StageModule> known = typed(layer);
      if (!known)
        throw ValueError(describe(fmt::format("layer {} of a torch::nn::ModuleList", layers.size()),
                                  layer->name(), "a module of one of the kinds that LayerList::of was given",
                                  "add its type to the template arguments"));
      layers.push_back(*known);
    }
  }
  return LayerList(std::move(layers));
}

std::vector<double> LayerList::parameter_counts() const {
  std::vector<double> counts;
  for (const StageModule& layer : layers_) {
    double count = 0;
    for (const at::Tensor& parameter : layer.parameters()) count += static_cast<double>(parameter.numel());
    counts.push_back(count);
  }
  return counts;
}

// The place of a module that can be replaced.
struct LayerStage::Slot {
  StageModule module;
};

LayerStage::LayerStage(const LayerList& layers, const std::vector<plan::LayerRange>& parts, int index,
                       const ModelEnds& ends)
    : index_(index), count_(static_cast<int>(parts.size())) {
  check_parts(parts, layers.size(), index);
  const plan::LayerRange part = parts[static_cast<std::size_t>(index)];
  slice_ = std::make_shared<torch::nn::Module>("slice");
  std::vector<std::shared_ptr<Slot>> slots;
  const auto add = [&](torch::nn::Module& parent, const std::string& name, const StageModule& module) {
    if (!module.modules().empty()) parent.register_module(name, module_of(module));
    return slots.emplace_back(std::make_shared<Slot>(Slot{module}));
  };
  if (index == 0 && ends.embed) add(*slice_, "embed", *ends.embed);
  const auto numbered = std::make_shared<torch::nn::Module>("layers");
  for (int layer = part.begin; layer < part.end; ++layer)
    add(*numbered, std::to_string(layer), layers[static_cast<std::size_t>(layer)]);
  if (part.size() > 0) slice_->register_module("layers", numbered);
  if (index == count_ - 1 && ends.head) head_ = add(*slice_, "head", *ends.head);
  if (slots.empty())
    throw ValueError(describe(fmt::format("stage {} of {}", index, count_), "neither layers nor an end",
                              "something to compute", "use fewer stages"));
  // The slice, which always has the modules of all slots, stands for the modules of the blocks.
  std::vector<StageModule> blocks;
  for (const std::shared_ptr<Slot>& slot : slots) {
    const auto run = [slot, slots](const Tree& args, const Tree& kwargs) {
      if (kwargs.size() > 0 && std::none_of(slots.begin(), slots.end(),
                                            [](const auto& each) { return each->module.takes_kwargs(); }))
        detail::refuse_kwargs(kwargs);
      return slot->module.forward(args, slot->module.takes_kwargs() ? kwargs : Tree());
    };
    blocks.emplace_back(run, blocks.empty() ? StageModule::Modules{slice_} : StageModule::Modules{});
  }
  module_ = StageModule::chain(std::move(blocks));
}

PipelineStage LayerStage::pipeline_stage(at::Device device, StageOptions options) const {
  slice_->to(device);
  return PipelineStage(*module_, index_, count_, device, std::move(options));
}

bool LayerStage::bind_head(const StageModule& head) {
  if (head_ == nullptr) return false;
  const bool had = slice_->named_children().contains("head");
  if (head.modules().empty()) {
    if (had) slice_->unregister_module("head");
  } else if (had) {
    slice_->replace_module("head", module_of(head));
  } else {
    slice_->register_module("head", module_of(head));
  }
  head_->module = head;
  return true;
}

}  // namespace penstock
