// How a tensor is distributed over one axis of a mesh.
//
//   Placements placements = {Shard{0}, Replicate{}};  // one per mesh axis
//   std::cout << to_string(placements);               // [S(0), R]
//   Placements parsed = parse_placements("[S(0), R]");
//
// The placements, and what each rank along the axis holds:
//
//   text      type             each rank holds
//   R         Replicate        the whole tensor
//   S(0)      Shard            a contiguous piece of dim 0, in order; later pieces may be smaller or empty
//   _S(0, 2)  StridedShard     its part of each piece of dim 0 that an axis further right made, see below
//   P(sum)    Partial          a term; the tensor is the sum (avg, min, max, product) of the terms
//
// A tensor on a mesh has one placement per axis; they apply from the leftmost axis to the rightmost. If the
// right axis has split a dim first (tensor parallel over tp, then sharded data parallel over dp), the left
// one is a StridedShard whose split_factor is the number of pieces that existed before it:
//
//   8 rows over dp=2 x tp=2     [S(0), S(0)]              [_S(0, 2), S(0)]
//                               tp 0      tp 1            tp 0      tp 1
//                        dp 0   rows 0-1  rows 2-3        rows 0-1  rows 4-5
//                        dp 1   rows 4-5  rows 6-7        rows 2-3  rows 6-7
//
// Placements have equality, a hash, and a text form that parses back to an equal value.
//
// Thread safety: values; concurrent reads are safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace penstock {

// The operation that combines the terms of a Partial placement.
enum class PartialOp {
  Sum,      // the tensor is the sum of the terms
  Avg,      // their mean
  Min,      // their elementwise minimum
  Max,      // their elementwise maximum
  Product,  // their elementwise product
};

// Returns "sum", "avg", "min", "max", "product".
std::string_view to_text(PartialOp op);

// Each rank along the axis holds a contiguous piece of one dim.
struct Shard {
  std::int64_t dim = 0;  // tensor dim; negative: counted from the end
  // Compares the dims as given: -1 differs from the number of the last dim.
  friend bool operator==(const Shard&, const Shard&) = default;
};

// Each rank along the axis holds its part of every piece that axes further right made of one dim.
struct StridedShard {
  std::int64_t dim = 0;           // tensor dim; negative: counted from the end
  std::int64_t split_factor = 1;  // number of pieces that were made first
  // Compares both members as given.
  friend bool operator==(const StridedShard&, const StridedShard&) = default;
};

// Each rank along the axis holds the whole tensor.
struct Replicate {
  // Always true.
  friend bool operator==(const Replicate&, const Replicate&) = default;
};

// Each rank along the axis holds a term of the whole shape.
struct Partial {
  PartialOp op = PartialOp::Sum;  // combines the terms
  // Compares the operations.
  friend bool operator==(const Partial&, const Partial&) = default;
};

// One of the four placements.
class Placement {
 public:
  // What a placement can be.
  using Variant = std::variant<Replicate, Shard, StridedShard, Partial>;

  // Replicate.
  Placement() = default;
  // Implicit, like the following ones, so that a list reads {Shard{0}, Replicate{}}.
  Placement(Replicate value) : value_(value) {}
  // Implicit.
  Placement(Shard value) : value_(value) {}
  // Implicit.
  Placement(StridedShard value) : value_(value) {}
  // Implicit.
  Placement(Partial value) : value_(value) {}

  // The placement itself, for std::visit and std::get_if.
  const Variant& variant() const { return value_; }

  // Whether it is Replicate.
  bool is_replicate() const { return std::holds_alternative<Replicate>(value_); }
  // Whether it is a Shard; a StridedShard is not.
  bool is_shard() const { return std::holds_alternative<Shard>(value_); }
  // Whether it is a Shard of this dim.
  bool is_shard(std::int64_t dim) const { return value_ == Variant(Shard{dim}); }
  // Whether it is a StridedShard.
  bool is_strided_shard() const { return std::holds_alternative<StridedShard>(value_); }
  // Whether it is Partial, with any operation.
  bool is_partial() const { return std::holds_alternative<Partial>(value_); }
  // Whether it is Partial with this operation.
  bool is_partial(PartialOp op) const { return value_ == Variant(Partial{op}); }
  // Whether it is a Shard or a StridedShard.
  bool splits() const { return is_shard() || is_strided_shard(); }
  // Whether it is a Shard or a StridedShard of this dim.
  bool splits(std::int64_t dim) const { return splits() && this->dim() == dim; }

  // Dim of a Shard or StridedShard. Throws StateError for other placements.
  std::int64_t dim() const;
  // Split factor of a StridedShard. Throws StateError for other placements.
  std::int64_t split_factor() const;
  // Operation of a Partial. Throws StateError for other placements.
  PartialOp partial_op() const;

  // Returns the text form: "R", "S(0)", "_S(0, 2)", "P(sum)".
  std::string to_string() const;

  // True if kind, dim, split factor and operation are equal.
  friend bool operator==(const Placement&, const Placement&) = default;

 private:
  Variant value_;
};

// The placements of a tensor, one per mesh axis.
using Placements = std::vector<Placement>;

// Returns the text form: "[S(0), R]".
std::string to_string(const Placements& placements);

// Reads "S(0)"; the inverse of Placement::to_string. Spaces between the parts are ignored. Throws ConfigError
// for malformed text.
Placement parse_placement(std::string_view text);
// Reads "[S(0), R]"; the inverse of to_string(Placements). Spaces between the parts are ignored. Throws
// ConfigError for malformed text.
Placements parse_placements(std::string_view text);

// Returns the same placements with negative dims replaced (-1 is the last dim). Throws ValueError unless
// there is one placement per mesh axis, every dim is within [-tensor_ndim, tensor_ndim), and every split
// factor is at least 1.
Placements normalize_placements(const Placements& placements, int mesh_ndim, std::int64_t tensor_ndim);

}  // namespace penstock

// Hash that agrees with operator==.
template <>
struct std::hash<penstock::Placement> {
  // Returns the hash of a placement.
  std::size_t operator()(const penstock::Placement& placement) const noexcept;
};

// Hash that agrees with operator==.
template <>
struct std::hash<penstock::Placements> {
  // Returns the hash of a list of placements.
  std::size_t operator()(const penstock::Placements& placements) const noexcept;
};
