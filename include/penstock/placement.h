// How a tensor lies on one axis of a mesh.
//
//   text      type             the ranks along the axis hold
//   R         Replicate        the whole tensor each
//   S(0)      Shard            a contiguous piece of dim 0 each, in order; later ones may be smaller or empty
//   _S(0, 2)  StridedShard     pieces of dim 0 that an axis further right has split first, see below
//   P(sum)    Partial          a term each; the tensor is the sum (avg, min, max, product) of the terms
//
// A tensor on a mesh has one placement per axis, and they apply from the left axis to the right one. Where a
// dim was split by the right axis first (tensor parallel over tp, then sharded data parallel over dp), the
// left one is a StridedShard whose split_factor is the number of pieces that were there before it:
//
//   8 rows over dp=2 x tp=2     [S(0), S(0)]              [_S(0, 2), S(0)]
//                               tp 0      tp 1            tp 0      tp 1
//                        dp 0   rows 0-1  rows 2-3        rows 0-1  rows 4-5
//                        dp 1   rows 4-5  rows 6-7        rows 2-3  rows 6-7
//
// Placements are values with equality, hash and a text form that is read back exactly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace penstock {

enum class PartialOp { Sum, Avg, Min, Max, Product };

// "sum", "avg", "min", "max", "product".
std::string_view to_text(PartialOp op);

struct Shard {
  std::int64_t dim = 0;
  friend bool operator==(const Shard&, const Shard&) = default;
};

struct StridedShard {
  std::int64_t dim = 0;
  std::int64_t split_factor = 1;
  friend bool operator==(const StridedShard&, const StridedShard&) = default;
};

struct Replicate {
  friend bool operator==(const Replicate&, const Replicate&) = default;
};

struct Partial {
  PartialOp op = PartialOp::Sum;
  friend bool operator==(const Partial&, const Partial&) = default;
};

class Placement {
 public:
  using Variant = std::variant<Replicate, Shard, StridedShard, Partial>;

  Placement() = default;  // Replicate
  // Implicit, so that a list reads {Shard{0}, Replicate{}}.
  Placement(Replicate value) : value_(value) {}
  Placement(Shard value) : value_(value) {}
  Placement(StridedShard value) : value_(value) {}
  Placement(Partial value) : value_(value) {}

  const Variant& variant() const { return value_; }

  bool is_replicate() const { return std::holds_alternative<Replicate>(value_); }
  bool is_shard() const { return std::holds_alternative<Shard>(value_); }
  bool is_shard(std::int64_t dim) const { return value_ == Variant(Shard{dim}); }
  bool is_strided_shard() const { return std::holds_alternative<StridedShard>(value_); }
  bool is_partial() const { return std::holds_alternative<Partial>(value_); }
  bool is_partial(PartialOp op) const { return value_ == Variant(Partial{op}); }
  // Shard or StridedShard.
  bool splits() const { return is_shard() || is_strided_shard(); }
  bool splits(std::int64_t dim) const { return splits() && this->dim() == dim; }

  // Of a placement that splits, of a StridedShard, of a Partial; StateError for another kind.
  std::int64_t dim() const;
  std::int64_t split_factor() const;
  PartialOp partial_op() const;

  std::string to_string() const;

  friend bool operator==(const Placement&, const Placement&) = default;

 private:
  Variant value_;
};

// One per mesh axis.
using Placements = std::vector<Placement>;

// "[S(0), R]".
std::string to_string(const Placements& placements);

// The inverse of to_string; spaces between the parts are free. Throws ConfigError for anything else.
Placement parse_placement(std::string_view text);
Placements parse_placements(std::string_view text);

// The same placements with dims counted from the front (-1 is the last dim). Throws ValueError when there is
// not one per mesh axis, a dim is outside the tensor, or a split factor is below 1.
Placements normalize_placements(const Placements& placements, int mesh_ndim, std::int64_t tensor_ndim);

}  // namespace penstock

template <>
struct std::hash<penstock::Placement> {
  std::size_t operator()(const penstock::Placement& placement) const noexcept;
};

template <>
struct std::hash<penstock::Placements> {
  std::size_t operator()(const penstock::Placements& placements) const noexcept;
};
