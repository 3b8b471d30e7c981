#include "penstock/graph/trace/analyze.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>

#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/graph/ir/byte_range.h"
#include "penstock/graph/trace/function_trace.h"

namespace penstock::graph {
namespace {

// Writes that change the geometry of a tensor but not its memory: transpose_, squeeze_, ...
bool writes_metadata_only(const Node& node) { return node.op.hasTag(at::Tag::inplace_view); }

// Outputs of operators that return several views at once (split, unbind), and views of those: autograd does
// not allow writing them.
std::vector<char> multi_output_views(const Graph& graph) {
  std::vector<char> is_one(graph.values.size(), 0);
  for (const Node& node : graph.nodes) {
    const OperatorTraits& traits = traits_of(node.op);
    for (std::size_t i = 0; i < node.results.size(); ++i) {
      const ReturnAlias& alias = traits.returns[i];
      if (alias.kind == ReturnAlias::Kind::Fresh || !alias.declared) continue;
      const Operand& viewed = node.arguments[static_cast<std::size_t>(alias.argument)];
      const bool several =
          alias.kind == ReturnAlias::Kind::View && node.results[i].kind == Operand::Kind::TensorList;
      const bool inherited = viewed.value() != kNoValue && is_one[index_of(viewed.value())];
      if (several || inherited)
        for (const ValueId value : node.results[i].values)
          if (value != kNoValue) is_one[index_of(value)] = 1;
    }
  }
  return is_one;
}

bool is_custom_function(const torch::autograd::Node& node) {
  return node.name().starts_with("torch::autograd::CppNode<");
}

// Whether a user-defined autograd function made this view or one that it is a view of: such a view cannot be
// recreated from its base with the same gradient. A view has exactly one base, so the search is linear.
bool made_by_custom_function(const at::Tensor& view) {
  if (!view.is_view()) return view.grad_fn() && is_custom_function(*view.grad_fn());
  const torch::autograd::Node* base = view._base().grad_fn().get();
  for (const torch::autograd::Node* node = view.grad_fn().get(); node != nullptr && node != base;
       node = node->num_outputs() == 1 ? node->next_edge(0).function.get() : nullptr)
    if (is_custom_function(*node)) return true;
  return false;
}

OutputType type_of_output(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? OutputType::Tensor : OutputType::None;
  if (value.isInt()) return OutputType::Int;
  if (value.isDouble()) return OutputType::Float;
  if (value.isBool()) return OutputType::Bool;
  if (value.isNone()) return OutputType::None;
  if (value.isString()) return OutputType::String;
  return OutputType::Other;
}

class Analysis {
 public:
  Analysis(FunctionTrace& trace, const AnalyzeOptions& options)
      : trace_(trace),
        options_(options),
        tracer_(trace.tracer),
        inputs_(trace.inputs),
        outputs_(trace.outputs) {}

  ViewAndMutationMeta run() {
    meta_.grad_mode_after = trace_.grad_mode_after;
    meta_.keep_input_mutations = options_.keep_input_mutations;
    describe_inputs();
    check_common_memory();
    describe_outputs();
    describe_tangents();
    return std::move(meta_);
  }

 private:
  static bool is_tensor(const c10::IValue& value) { return FunctionTrace::is_tensor(value); }

  void describe_inputs() {
    // What was written, by storage.
    struct Written {
      bool touched = false, data = false, with_grad = false;
      ByteRange place;  // what was written is within it
      void add(const Written& other) {
        touched |= other.touched;
        data |= other.data;
        with_grad |= other.with_grad;
        place.add(other.place);
      }
    };
    std::vector<Written> written(static_cast<std::size_t>(tracer_.graph.storages));
    // The inputs themselves, as opposed to views of them: changing a shape affects one tensor, not its
    // memory.
    std::set<ValueId> is_input;
    for (const Placeholder& input : tracer_.graph.inputs) is_input.insert(input.value);
    for (const Node& node : tracer_.graph.nodes)
      for (const std::size_t argument : written_arguments(node))
        for (const ValueId value : node.arguments[argument].values) {
          if (value == kNoValue) continue;
          Written& storage = written[index_of(tracer_.graph[value].storage)];
          if (writes_metadata_only(node)) {
            if (!is_input.contains(value)) continue;
            storage.touched = true;
            for_each_value(node.results, [&](ValueId result) { is_input.insert(result); });
            continue;
          }
          storage.touched = storage.data = true;
          storage.place.add(byte_range(tracer_.graph[value].geometry));
          storage.with_grad |= node.grad_enabled;
        }
    const bool with_subclasses = any_subclass();
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      InputInfo info;
      info.keep_input_mutations = options_.keep_input_mutations;
      if (!is_tensor(inputs_[i])) {
        info.mutations_hidden_from_autograd = false;
        info.is_tensor = false;
        meta_.inputs.push_back(info);
        continue;
      }
      const at::Tensor& fake = inputs_[i].toTensor();
      Written storage;
      for (const StorageId memory : trace_.memory_before[i]) storage.add(written[index_of(memory)]);
      const bool replaced = has_other_memory(i);
      if (is_subclass(fake)) check_subclass_input(i, fake, replaced);
      if (replaced && storage.data)
        throw NotImplemented(fmt::format(
            "graph: {} is written and also given other memory (set_), so that nothing refers to what "
            "was written; write a copy, or do not call set_",
            options_.convention.name_of(i)));
      if (replaced && fake.requires_grad())
        throw NotImplemented(fmt::format(
            "graph: {} is given other memory (set_), into which values that require a gradient are written; "
            "return them instead",
            options_.convention.name_of(i)));
      if (storage.data && !is_subclass(fake)) check_covered_write(i, fake, storage.place);
      info.is_leaf = trace_.is_leaf[i] != 0;
      info.is_touched = storage.touched || replaced;
      info.mutates_data = storage.data;
      info.mutates_metadata = replaced || !has_geometry(fake, trace_.before[i]);
      info.mutations_hidden_from_autograd = !storage.data;
      info.mutations_under_no_grad = storage.data && !storage.with_grad;
      info.mutates_storage_metadata = replaced;
      info.requires_grad = fake.requires_grad();
      if (options_.keep_only_data_mutations && (info.mutates_metadata || with_subclasses))
        info.keep_input_mutations = false;
      info.validate(i);
      if (!is_subclass(fake)) check_overlapping_write(i, info);
      meta_.inputs.push_back(info);
    }
  }

  // Later writes to one of them would have to be seen in the other.
  void check_common_memory() const {
    std::map<StorageId, std::size_t> given;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      if (!is_tensor(inputs_[i]) || !has_other_memory(i)) continue;
      const auto [entry, is_new] = given.try_emplace(tracer_.storage_of(inputs_[i].toTensor()), i);
      if (!is_new && !inputs_[i].toTensor().is_same(inputs_[entry->second].toTensor()))
        throw NotImplemented(
            fmt::format("graph: {} and {} are given the same memory (set_); give it to one of them",
                        options_.convention.name_of(entry->second), options_.convention.name_of(i)));
    }
  }

  // By set_.
  bool has_other_memory(std::size_t input) const {
    for (std::size_t part = 0; part < trace_.parts[input].size(); ++part)
      if (tracer_.storage_of(trace_.parts[input][part]) != trace_.memory_before[input][part]) return true;
    return false;
  }

  // An input that has fewer elements afterwards (resize_, as_strided_) is written back as it is then: what
  // was written elsewhere in its memory would be lost.
  void check_covered_write(std::size_t input, const at::Tensor& after, const ByteRange& written) const {
    const Geometry &was = trace_.before[input], now = geometry_of(after);
    const bool dense = after.is_non_overlapping_and_dense();
    const ByteRange range = byte_range(now);
    const bool covered = dense && range.first <= written.first && written.end <= range.end;
    if (has_geometry(after, was) || (dense && now.numel() >= was.numel()) || covered) return;
    if (now.numel() == was.numel() && !overlaps_itself(now) && range == byte_range(was)) return;
    throw NotImplemented(fmt::format(
        "graph: {} is written, and has fewer elements or others of its memory afterwards (resize_, "
        "as_strided_); change the shape of a view of it",
        options_.convention.name_of(input)));
  }

  // If several elements share an address, it is undefined which written value remains, and the gradient of
  // one element would be divided among all of them.
  void check_overlapping_write(std::size_t input, const InputInfo& info) const {
    if (!info.mutates_data && !(info.mutates_metadata && info.requires_grad)) return;
    if (overlaps_itself(trace_.before[input]))
      throw NotImplemented(
          fmt::format("graph: {} has elements that share memory (expand, unfold), and the function {}; pass "
                      "a contiguous copy",
                      options_.convention.name_of(input),
                      info.mutates_data ? "writes it" : "changes its shape in place"));
  }

  bool any_subclass() const {
    return std::any_of(inputs_.begin(), inputs_.end(), [](const c10::IValue& input) {
      return is_tensor(input) && is_subclass(input.toTensor());
    });
  }

  // A subclass is written back as a whole: its kind and geometry must not change.
  void check_subclass_input(std::size_t input, const at::Tensor& fake, bool replaced) {
    std::size_t primal = 0;
    for (std::size_t i = 0; i < input; ++i) primal += is_tensor(inputs_[i]) ? 1 : 0;
    const bool same = !replaced && trace_.records[primal].matches(fake);
    if (!same)
      throw NotImplemented(
          fmt::format("graph: {}, {}, changes its shape, layout or memory in place (transpose_, set_ ...), "
                      "which cannot be written back "
                      "into a subclass; take a view of it",
                      options_.convention.name_of(input), type_text(fake)));
  }

  // Per storage: the number of outputs, and how many of them are one of several views made at once.
  struct Aliases {
    std::size_t outputs = 0, multi_output_views = 0;
    std::size_t others() const { return outputs - multi_output_views; }
  };

  void describe_outputs() {
    // An input that has the memory of another one afterwards (set_) is not the one that results are views of.
    for (const bool with_other_memory : {true, false})
      for (std::size_t i = 0; i < inputs_.size(); ++i)
        if (is_tensor(inputs_[i]) && has_other_memory(i) == with_other_memory)
          for (const at::Tensor& part : trace_.parts[i]) {
            if (is_subclass(inputs_[i].toTensor()))
              subclass_storages_.insert(tracer_.storage_of(part));
            else
              input_of_storage_[tracer_.storage_of(part)] = i;
          }
    for (std::size_t i = 0; i < inputs_.size(); ++i)
      if (is_tensor(inputs_[i]) && has_other_memory(i))
        left_memory_.insert(trace_.memory_before[i].begin(), trace_.memory_before[i].end());
    for (std::size_t i = 0; i < outputs_.size(); ++i)
      if (is_tensor(outputs_[i])) {
        for (const at::Tensor& part : plain_parts(outputs_[i].toTensor()))
          tracer_.value_of(part);  // an output may be a constant
        output_of_tensor_[outputs_[i].toTensor().unsafeGetTensorImpl()] = i;
      }
    const std::vector<char> multi = multi_output_views(tracer_.graph);
    for (const c10::IValue& output : outputs_)
      if (is_tensor(output) && !is_subclass(output.toTensor())) {
        Aliases& aliases = aliases_[tracer_.storage_of(output.toTensor())];
        ++aliases.outputs;
        aliases.multi_output_views += multi[index_of(tracer_.value_of(output.toTensor()))] ? 1 : 0;
      }
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
      const c10::IValue& output = outputs_[i];
      OutputInfo info;
      info.type = type_of_output(output);
      if (is_tensor(output)) {
        if (!describe_with_subclasses(output.toTensor(), &info)) describe_tensor(output.toTensor(), &info);
        info.has_view_replay = replays_view(info);
        describe_view(i, output.toTensor(), &info);
        for (std::size_t j = 0; j < i && !info.same_as; ++j)
          if (is_tensor(outputs_[j]) && outputs_[j].toTensor().is_same(output.toTensor())) info.same_as = j;
      }
      meta_.outputs.push_back(std::move(info));
    }
    meta_.intermediate_bases = bases_.size();
  }

  static void describe_gradient(const at::Tensor& output, OutputInfo* info) {
    info->requires_grad = output.requires_grad();
    // A view taken under no_grad has requires_grad set if its base does, but has no gradient function.
    info->requires_grad_for_backward = info->requires_grad && (!output.is_view() || output.grad_fn());
    info->geometry = geometry_of(output);
  }

  bool replays_view(const OutputInfo& info) const {
    if (is_fresh(info.kind) || info.kind == OutputKind::IsInput) return false;
    return info.kind != OutputKind::AliasOfInput || !meta_.inputs[*info.base_index].mutates_metadata;
  }

  // Describes how the result is made from its base at run time.
  void describe_view(std::size_t output, const at::Tensor& tensor, OutputInfo* info) {
    if (is_fresh(info->kind) || info->kind == OutputKind::IsInput) return;
    const auto base_of = [&]() -> at::Tensor {
      if (info->kind == OutputKind::AliasOfInput) return inputs_[*info->base_index].toTensor();
      if (info->kind == OutputKind::AliasOfIntermediateBaseIsUserOutput)
        return outputs_[*info->base_index].toTensor();
      return bases_[*info->base_index];
    };
    const at::Tensor base = base_of();
    auto replay = find_view_replay(tracer_.graph, tracer_.value_of(base), tracer_.value_of(tensor));
    if (replay && !replay->steps.empty()) {
      info->view = std::move(*replay);
      return;
    }
    // The shape of the base has changed since the view was made. Only the geometry is known then, which is
    // enough if the memory has the same interpretation and each gradient element has a single destination.
    info->by_geometry = true;
    const Geometry geometry = geometry_of(base);
    if (geometry.dtype != info->geometry.dtype || geometry.conjugated != info->geometry.conjugated ||
        geometry.negated != info->geometry.negated ||
        (info->requires_grad_for_backward && overlaps_itself(geometry)))
      throw NotImplemented(
          fmt::format("graph: result {} is a view of another dtype, a conjugate, or a view of an expanded "
                      "tensor, and the shape of its "
                      "base is changed in place (transpose_ ...); return a clone of it",
                      output));
  }

  // A subclass, or a plain tensor in the memory of one, is either an input or an output of the graph: memory
  // it shares with inputs and other results is shared there as well, invisible to autograd. Returns false for
  // all other outputs.
  bool describe_with_subclasses(const at::Tensor& output, OutputInfo* info) {
    if (!is_subclass(output) && !subclass_storages_.contains(tracer_.storage_of(output))) return false;
    describe_gradient(output, info);
    for (std::size_t i = 0; i < inputs_.size(); ++i)
      if (is_tensor(inputs_[i]) && inputs_[i].toTensor().is_same(output)) {
        info->kind = OutputKind::IsInput;
        info->base_index = i;
        return true;
      }
    info->kind = OutputKind::NonAlias;
    return true;
  }

  void describe_tensor(const at::Tensor& output, OutputInfo* info) {
    describe_gradient(output, info);
    const StorageId storage = tracer_.storage_of(output);
    const Aliases& aliases = aliases_[storage];
    if (const auto input = input_of_storage_.find(storage); input != input_of_storage_.end()) {
      if (made_by_custom_function(output)) {
        info->kind = OutputKind::CustomFunctionView;
        return;
      }
      info->base_index = an_input(output).value_or(input->second);
      // Only views that autograd does not allow to be written: their aliasing may be hidden from it.
      if (output.grad_fn() && aliases.others() == 0)
        info->kind = OutputKind::NonAlias;
      else
        info->kind = an_input(output) ? OutputKind::IsInput : OutputKind::AliasOfInput;
      if (info->kind == OutputKind::AliasOfInput && has_other_memory(*info->base_index))
        throw NotImplemented(
            fmt::format("graph: a result shares the memory that {} is given by set_; return a clone of it, "
                        "or the input itself",
                        options_.convention.name_of(*info->base_index)));
      // x.detach().copy_(y): the memory of x with the gradient of y. A view of x made at run time would have
      // the gradient of x.
      if (info->kind == OutputKind::AliasOfInput && output.requires_grad() &&
          !(output.is_view() && output._base().is_same(inputs_[input->second].toTensor())))
        throw NotImplemented(fmt::format(
            "graph: a result uses the memory of {}, but autograd does not know it as a view, and it "
            "requires a gradient; return a clone of it",
            options_.convention.name_of(input->second)));
      return;
    }
    if (left_memory_.contains(storage))
      throw NotImplemented(
          "graph: a result is a view of an input that is given other memory afterwards (set_); return a "
          "clone of "
          "it");
    if (output.is_view() && aliases.outputs > 1 && made_by_custom_function(output))
      info->kind = OutputKind::CustomFunctionView;
    else if (output.is_view() && output.requires_grad() && output._base().requires_grad())
      describe_intermediate_view(output, aliases, info);
    else if (!output.requires_grad() && aliases.outputs > 1)
      describe_detached_twin(output, info);
  }

  void describe_intermediate_view(const at::Tensor& output, const Aliases& aliases, OutputInfo* info) {
    if (aliases.outputs == 1 || aliases.others() <= 1) {
      info->kind = OutputKind::UnsafeViewAlias;
      return;
    }
    const c10::TensorImpl* base = output._base().unsafeGetTensorImpl();
    if (const auto existing = output_of_tensor_.find(base); existing != output_of_tensor_.end()) {
      info->kind = OutputKind::AliasOfIntermediateBaseIsUserOutput;
      info->base_index = existing->second;
      return;
    }
    const auto [entry, is_new] = base_of_tensor_.try_emplace(base, bases_.size());
    if (is_new) bases_.emplace_back(output._base());
    info->kind = is_new ? OutputKind::AliasOfIntermediateSaveAsOutput : OutputKind::AliasOfIntermediate;
    info->base_index = entry->second;
  }

  // (y, y.detach()): made from y at run time, so that both still share memory.
  void describe_detached_twin(const at::Tensor& output, OutputInfo* info) {
    for (const c10::IValue& other : outputs_) {
      if (!is_tensor(other) || !other.toTensor().requires_grad() || other.toTensor().is_same(output))
        continue;
      if (tracer_.storage_of(other.toTensor()) != tracer_.storage_of(output) ||
          !has_geometry(other.toTensor(), info->geometry))
        continue;
      info->kind = OutputKind::AliasOfIntermediateBaseIsUserOutput;
      info->base_index = output_of_tensor_.at(other.toTensor().unsafeGetTensorImpl());
      return;
    }
  }

  // The last one that is this tensor.
  std::optional<std::size_t> an_input(const at::Tensor& output) const {
    for (std::size_t i = inputs_.size(); i-- > 0;)
      if (is_tensor(inputs_[i]) && inputs_[i].toTensor().is_same(output)) return i;
    return std::nullopt;
  }

  void describe_tangents() {
    using Kind = TangentInfo::Kind;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      const InputInfo& info = meta_.inputs[i];
      if (info.mutation_type() == MutationType::MutatedOutOfGraph && info.mutates_data && info.requires_grad)
        meta_.tangents.push_back({Kind::MutatedInput, i, of_gradient(geometry_of(inputs_[i].toTensor()))});
    }
    for (std::size_t i = 0; i < outputs_.size(); ++i)
      if (is_fresh(meta_.outputs[i].kind) && meta_.outputs[i].requires_grad_for_backward)
        meta_.tangents.push_back({Kind::Output, i, of_gradient(meta_.outputs[i].geometry)});
    for (std::size_t i = 0; i < bases_.size(); ++i)
      meta_.tangents.push_back({Kind::IntermediateBase, i, of_gradient(geometry_of(bases_[i]))});
  }
  // The gradient of a lazy conjugate is not a lazy conjugate.
  static Geometry of_gradient(Geometry result) {
    result.conjugated = result.negated = false;
    return result;
  }

  FunctionTrace& trace_;
  const AnalyzeOptions& options_;
  Tracer& tracer_;
  const Values &inputs_, &outputs_;
  ViewAndMutationMeta meta_;
  // The last one, plain inputs only.
  std::map<StorageId, std::size_t> input_of_storage_;
  // Of inputs that are subclasses.
  std::set<StorageId> subclass_storages_;
  // Of inputs that have other memory afterwards, before that.
  std::set<StorageId> left_memory_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> output_of_tensor_;  // the last one
  std::map<StorageId, Aliases> aliases_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> base_of_tensor_;
  std::vector<at::Tensor> bases_;
};

}  // namespace

ViewAndMutationMeta analyze(FunctionTrace& trace, const AnalyzeOptions& options) {
  return Analysis(trace, options).run();
}

ViewAndMutationMeta analyze(const Function& function, const Values& inputs, const AnalyzeOptions& options) {
  FunctionTrace trace(function, inputs, options.convention, FunctionTrace::Leaves::AsTheyAre);
  return analyze(trace, options);
}

}  // namespace penstock::graph
