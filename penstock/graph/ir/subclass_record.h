// How the tensors that a function takes and returns are placed in the flat list of plain tensors of its
// graph.
//
//   const FlattenRecord record = FlattenRecord::of(dtensor, 3);   // the indices 3 ... 3 + record.count() - 1
//   record.flatten(dtensor, flat);                                // appends the inner tensors to a list
//   at::Tensor again = record.rebuild(flat);                      // from flat[3] on; same kind and context
//
// A plain tensor is one entry of the list. A subclass (penstock/tensor_subclass.h) takes one entry for each
// plain tensor inside it, in the order of its inner_tensors(), including those of nested subclasses. A record
// holds no tensor memory and no autograd state: whatever a subclass has besides its tensors (a DTensor's mesh
// and placements) is kept as a payload around fake tensors, so a record may live as long as the capture.
//
// Sizes and strides are fixed numbers, like everything in a capture: the outer ones are part of the record
// and not arguments of the graph.
// Thread safety: that of a value type.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "penstock/graph/ir/graph.h"
#include "penstock/tensor_subclass.h"

namespace penstock::graph {

// Whether the tensor has a payload other than a fake tensor's, so that it handles its operators itself.
bool is_subclass(const at::Tensor& tensor);

// The plain tensors in a tensor, in order: the tensor itself, or the ones it contains.
std::vector<at::Tensor> plain_parts(const at::Tensor& tensor);

// The same tensor without data; a subclass becomes one around fake tensors. Keeps requires_grad. Throws
// NotImplemented for a subclass that cannot be flattened, TypeError for one whose kind is not registered.
at::Tensor to_fake_parts(const at::Tensor& tensor);

struct PlainTensorMeta {
  std::size_t flat_index = 0;
  // Std::nullopt: not a tensor but a number, or an output that is made at run time.
  std::optional<Geometry> geometry;

  bool operator==(const PlainTensorMeta&) const = default;
};

class FlattenRecord;

struct SubclassMeta {
  std::size_t first_flat = 0;
  // Of plain tensors, including those of inner subclasses.
  std::size_t count = 0;
  std::vector<std::pair<std::string, FlattenRecord>> attributes;  // in the order of inner_tensors()
  WrapperGeometry outer;                                          // the geometry of the wrapper
  PayloadPtr like;                                                // kind and context, around fake tensors

  std::string_view kind() const { return like->kind(); }
  // A tensor of this kind and context, around fake tensors.
  at::Tensor sample() const;
  // "DTensor [S(0)]"
  std::string to_text() const;
  bool operator==(const SubclassMeta& other) const;
};

class FlattenRecord {
 public:
  FlattenRecord() = default;
  FlattenRecord(PlainTensorMeta plain) : meta_(std::move(plain)) {}
  FlattenRecord(SubclassMeta subclass) : meta_(std::move(subclass)) {}
  // Describes a real or fake tensor whose first plain tensor has index `first_flat`.
  static FlattenRecord of(const at::Tensor& tensor, std::size_t first_flat);

  bool is_subclass() const { return std::holds_alternative<SubclassMeta>(meta_); }
  const SubclassMeta& subclass() const { return std::get<SubclassMeta>(meta_); }
  const PlainTensorMeta& plain() const { return std::get<PlainTensorMeta>(meta_); }
  std::size_t first_flat() const { return is_subclass() ? subclass().first_flat : plain().flat_index; }
  std::size_t count() const { return is_subclass() ? subclass().count : 1; }

  // Whether a tensor has this kind, context and geometry, including its inner tensors. Storage offsets are
  // compared.
  bool matches(const at::Tensor& tensor) const;
  // Describes the difference, or returns an empty string if the tensor matches: "a plain tensor", "of kind
  // DTensor [R]".
  std::string difference(const at::Tensor& tensor) const;

  // Appends the inner tensors of a tensor that matches to `flat`. Throws InvariantError if their number
  // differs.
  void flatten(const at::Tensor& tensor, std::vector<at::Tensor>& flat) const;
  // Builds the tensor from flat[first_flat()] on; returns an undefined tensor if the plain one is undefined.
  // Throws ValueError if the list is too short or some tensors of a subclass are missing.
  at::Tensor rebuild(const std::vector<at::Tensor>& flat) const;

  // Calls `visit(PlainTensorMeta)` for each plain tensor in order.
  template <class Visit>
  void for_each_plain(Visit&& visit) const {
    if (!is_subclass()) return visit(plain());
    for (const auto& [name, attribute] : subclass().attributes) attribute.for_each_plain(visit);
  }
  // The names of the plain tensors: ".local", ".a.inner"; empty for a plain tensor.
  std::vector<std::string> plain_names() const;

  bool operator==(const FlattenRecord&) const = default;

 private:
  std::variant<PlainTensorMeta, SubclassMeta> meta_;
};

// Describes a subclass by kind and context, "DTensor [S(0)]"; returns "a plain tensor" for any other tensor.
std::string type_text(const at::Tensor& tensor);

// The records of a captured call. Used only if some tensor is a subclass; otherwise each tensor is one entry.
struct SubclassLayout {
  std::vector<FlattenRecord> inputs;  // the tensors among the inputs, after duplicates are removed
  // Mutated inputs, results, intermediate bases; without the tensors saved for backward.
  std::vector<FlattenRecord> forward_outputs;
  // For each plain tensor among the forward outputs: the graph input in whose memory the result is, if the
  // function writes that input. The graph returns it in its own memory; it is recreated as a view of the
  // input.
  std::vector<std::optional<std::size_t>> in_mutated_input;
  std::vector<FlattenRecord> tangents;  // as backward expects them; does not count saved tensors
  // What backward returns, one for each of `inputs`; may be a subclass where the input is plain, and vice
  // versa.
  std::vector<FlattenRecord> input_gradients;

  bool operator==(const SubclassLayout&) const = default;
};

}  // namespace penstock::graph
