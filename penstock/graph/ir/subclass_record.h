// How tensors that a function takes and gives lie in the flat list of plain tensors that its graph takes and gives.
//
//   const FlattenRecord record = FlattenRecord::of(dtensor, 3);     // its inner tensors are numbers 3 ... 3 + record.count() - 1
//   record.flatten(dtensor, flat);                                // those tensors, at the end of a list
//   at::Tensor again = record.rebuild(flat);                      // a wrapper of the same kind and context, from flat[3] on
//
// A plain tensor is one entry of the list. A subclass (penstock/tensor_subclass.h) is as many as it holds, in the order of its inner_tensors(), those
// of subclasses inside of it among them. A record holds no memory and nothing of autograd: what a subclass has besides its tensors (a DTensor's mesh
// and placements) is kept as a payload around fake tensors, so a record may live as long as the capture.
//
// Sizes and strides are numbers, as everything in a capture: the outer ones stand in the record, and no argument carries them.
// Thread rule: a value.
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

// A tensor with a payload that is no fake tensor: one that handles its operators itself.
bool is_subclass(const at::Tensor& tensor);

// The plain tensors in a tensor, in order: itself, or what it holds.
std::vector<at::Tensor> plain_parts(const at::Tensor& tensor);

// The same tensor in shape only, a subclass around fake tensors; requires_grad as it was. Throws NotImplemented for a subclass that cannot be
// taken apart, TypeError for one whose kind is not registered.
at::Tensor to_fake_parts(const at::Tensor& tensor);

struct PlainTensorMeta {
  std::size_t flat_index = 0;
  std::optional<Geometry> geometry;   // nothing: no tensor stands here, but a number or an output that is made at run time

  bool operator==(const PlainTensorMeta&) const = default;
};

class FlattenRecord;

struct SubclassMeta {
  std::size_t first_flat = 0;
  std::size_t count = 0;                                               // of plain tensors, those of inner subclasses among them
  std::vector<std::pair<std::string, FlattenRecord>> attributes;        // in the order of inner_tensors()
  WrapperGeometry outer;                                               // what the wrapper shows
  PayloadPtr like;                                                     // kind and context, around fake tensors

  std::string_view kind() const { return like->kind(); }
  // "DTensor [S(0)]"
  std::string to_text() const;
  bool operator==(const SubclassMeta& other) const;
};

class FlattenRecord {
 public:
  FlattenRecord() = default;
  FlattenRecord(PlainTensorMeta plain) : meta_(std::move(plain)) {}
  FlattenRecord(SubclassMeta subclass) : meta_(std::move(subclass)) {}
  // Of a real or fake tensor; its first plain tensor has the number `first_flat`.
  static FlattenRecord of(const at::Tensor& tensor, std::size_t first_flat);

  bool is_subclass() const { return std::holds_alternative<SubclassMeta>(meta_); }
  const SubclassMeta& subclass() const { return std::get<SubclassMeta>(meta_); }
  const PlainTensorMeta& plain() const { return std::get<PlainTensorMeta>(meta_); }
  std::size_t first_flat() const { return is_subclass() ? subclass().first_flat : plain().flat_index; }
  std::size_t count() const { return is_subclass() ? subclass().count : 1; }

  // Whether a tensor is of this kind, context and geometry, inner tensors included. Offsets in memory count.
  bool matches(const at::Tensor& tensor) const;
  // What differs; empty when it matches: "a plain tensor", "of kind DTensor [R]".
  std::string difference(const at::Tensor& tensor) const;

  // The inner tensors of a tensor that matches, at the end of `flat`. Others are an InvariantError when the number differs.
  void flatten(const at::Tensor& tensor, std::vector<at::Tensor>& flat) const;
  // From flat[first_flat()] on; undefined when a plain one is. Throws ValueError where the list is too short or some of a subclass are missing.
  at::Tensor rebuild(const std::vector<at::Tensor>& flat) const;

  // Calls `visit(PlainTensorMeta)` for each plain tensor in order.
  template <class Visit>
  void for_each_plain(Visit&& visit) const {
    if (!is_subclass()) return visit(plain());
    for (const auto& [name, attribute] : subclass().attributes) attribute.for_each_plain(visit);
  }
  // The names of the plain tensors: ".local", ".a.inner"; an empty one for a plain tensor.
  std::vector<std::string> plain_names() const;

  bool operator==(const FlattenRecord&) const = default;

 private:
  std::variant<PlainTensorMeta, SubclassMeta> meta_;
};

// A subclass as text: kind and context, which says most: "DTensor [S(0)]". "a plain tensor" for another.
std::string type_text(const at::Tensor& tensor);

// The records of a captured call. Only where some tensor is a subclass: without them each tensor is one entry.
struct SubclassLayout {
  std::vector<FlattenRecord> inputs;            // the tensors among the inputs, of the function with duplicates removed
  std::vector<FlattenRecord> forward_outputs;   // written inputs, results, intermediate bases: without what is saved for backward
  // For each plain tensor among the forward outputs: the input of the graph in whose memory a result lies that the function writes. The graph gives it
  // memory of its own; it is made again as a view of the input.
  std::vector<std::optional<std::size_t>> in_written_input;
  std::vector<FlattenRecord> tangents;          // as backward expects them, counted without what is saved
  std::vector<FlattenRecord> input_gradients;   // what backward returns, one for each of `inputs`; may be a subclass where the input is none, and the other way round

  bool operator==(const SubclassLayout&) const = default;
};

}  // namespace penstock::graph
