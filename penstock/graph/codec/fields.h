// The fields of the structs that are stored, each listed once for writing and reading.
//
// A function here takes apart its struct by a structured binding that names every member. A struct with
// another number of members does not compile until its list, and with it the stored form, is changed: then
// increment kCaptureVersion (capture_codec.h) and kGraphFileVersion (graph_file.h), and add the member to the
// table of tests/graph/capture_codec_test.cpp.
#pragma once

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>

#include "penstock/graph/ir/joint_graph.h"
#include "penstock/graph/ir/metadata.h"
#include "penstock/graph/ir/subclass_record.h"
#include "penstock/graph/ir/symbolic_table.h"

namespace penstock::graph {

// `T` or `const T`.
template <class Actual, class T>
concept Is = std::same_as<std::remove_const_t<Actual>, T>;

// The last enumerator of each stored enum.
constexpr OutputKind last_of(OutputKind) { return OutputKind::CustomFunctionView; }
constexpr OutputType last_of(OutputType) { return OutputType::Other; }
constexpr TangentInfo::Kind last_of(TangentInfo::Kind) { return TangentInfo::Kind::IntermediateBase; }
constexpr NumberExpression::Form last_of(NumberExpression::Form) {
  return NumberExpression::Form::QuotientOfRoot;
}
constexpr Phase last_of(Phase) { return Phase::Backward; }
constexpr StateKind last_of(StateKind) { return StateKind::Generator; }

// Something that may be absent.
template <class Archive, class T>
void archive_shared(Archive& archive, std::shared_ptr<const T>& shared) {
  bool any = shared != nullptr;
  archive(any);
  if (!any) return;
  T value;
  archive(value);
  shared = std::make_shared<const T>(std::move(value));
}
template <class Archive, class T>
void archive_shared(Archive& archive, const std::shared_ptr<const T>& shared) {
  archive(shared != nullptr);
  if (shared) archive(*shared);
}

template <class Archive, Is<InputInfo> T>
void fields(Archive& archive, T& info) {
  auto& [is_leaf, mutates_data, mutates_metadata, hidden, under_no_grad, storage_metadata, resizes,
         requires_grad, keep, touched, is_tensor] = info;
  archive(is_leaf, mutates_data, mutates_metadata, hidden, under_no_grad, storage_metadata, resizes,
          requires_grad, keep, touched, is_tensor);
}

template <class Archive, Is<ViewReplay> T>
void fields(Archive& archive, T& replay) {
  auto& [steps] = replay;
  archive(steps);
}

template <class Archive, Is<OutputInfo> T>
void fields(Archive& archive, T& info) {
  auto& [kind, type, base_index, requires_grad, for_backward, same_as, geometry, dynamic_dims, has_replay,
         by_geometry, view] = info;
  archive(kind, type, base_index, requires_grad, for_backward, same_as, geometry, dynamic_dims, has_replay,
          by_geometry, view);
}

template <class Archive, Is<TangentInfo> T>
void fields(Archive& archive, T& info) {
  auto& [kind, index, geometry] = info;
  archive(kind, index, geometry);
}

template <class Archive, Is<ViewAndMutationMeta> T>
void fields(Archive& archive, T& meta) {
  auto& [inputs, outputs, bases, keep, tangents, grad_mode_after, symbols, static_inputs, tokens,
         backward_tokens, explicit_random_states, random_states, backward_random_states] = meta;
  archive(inputs, outputs, bases, keep, tangents, grad_mode_after, symbols, static_inputs, tokens,
          backward_tokens, explicit_random_states, random_states, backward_random_states);
}

template <class Archive, Is<PlainTensorMeta> T>
void fields(Archive& archive, T& meta) {
  auto& [flat_index, geometry] = meta;
  archive(flat_index, geometry);
}

template <class Archive, Is<SubclassLayout> T>
void fields(Archive& archive, T& layout) {
  auto& [inputs, outputs, in_mutated_input, tangents, gradients] = layout;
  archive(inputs, outputs, in_mutated_input, tangents, gradients);
}

// Without the generator that a function has passed itself: its nodes hold it, and are refused.
template <class Archive, Is<StateChain> T>
void fields(Archive& archive, T& chain) {
  auto& [kind, phase, name, device, generator] = chain;
  archive(kind, phase, name, device);
}

template <class Archive, Is<JointGraph> T>
void fields(Archive& archive, T& joint) {
  auto& [graph, primals, forward_outputs, tangents, written_in_backward, written_in_graph, subclasses,
         states] = joint;
  // First: text in the graph may refer to the contexts of subclasses.
  archive_shared(archive, subclasses);
  archive(graph, primals, forward_outputs, tangents, written_in_backward, written_in_graph, states);
}

template <class Archive, Is<SizeExpression::Term> T>
void fields(Archive& archive, T& term) {
  auto& [coefficient, exponents] = term;
  archive(coefficient, exponents);
}

template <class Archive, Is<NumberExpression> T>
void fields(Archive& archive, T& number) {
  auto& [form, factor, size] = number;
  archive(form, factor, size);
}

template <class Archive, Is<SymbolicGeometry> T>
void fields(Archive& archive, T& geometry) {
  auto& [sizes, strides, offset, used] = geometry;
  archive(sizes, strides, offset, used);
}

template <class Archive, Is<SymbolicConstant> T>
void fields(Archive& archive, T& constant) {
  auto& [example, numbers] = constant;
  archive(example, numbers);
}

template <class Archive, Is<SymbolicTensor> T>
void fields(Archive& archive, T& tensor) {
  auto& [example, number, part] = tensor;
  archive(example, number, part);
}

template <class Archive, Is<SymbolSet::Quotient> T>
void fields(Archive& archive, T& quotient) {
  auto& [numerator, divisor] = quotient;
  archive(numerator, divisor);
}

template <class Archive, Is<SymbolicTable> T>
void fields(Archive& archive, T& table) {
  auto& [symbols, constants, geometries, tensors] = table;
  archive(symbols, constants, geometries, tensors);
}

// An archive for the question whether a type has fields.
struct AnyArchive {
  static constexpr bool kReads = false;
  template <class... Items>
  void operator()(const Items&...) {}
};
template <class T>
concept HasFields = requires(AnyArchive& archive, const T& value) {
  fields(archive, value);
};

}  // namespace penstock::graph
