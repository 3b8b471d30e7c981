#include "penstock/placement.h"

#include <fmt/format.h>

#include <array>
#include <charconv>

#include "penstock/base/describe.h"
#include "penstock/base/hash.h"
#include "penstock/errors.h"

namespace penstock {

namespace {

constexpr std::array kPartialOps = {PartialOp::Sum, PartialOp::Avg, PartialOp::Min, PartialOp::Max,
                                    PartialOp::Product};

// Reads a placement from the front of a text.
class Reader {
 public:
  explicit Reader(std::string_view text) : whole_(text), rest_(text) {}

  Placement placement() {
    if (take("R")) return Replicate{};
    if (take("S")) {
      expect("(");
      const std::int64_t dim = number();
      expect(")");
      return Shard{dim};
    }
    if (take("_S")) {
      expect("(");
      const std::int64_t dim = number();
      expect(",");
      const std::int64_t split_factor = number();
      expect(")");
      if (split_factor < 1) fail();
      return StridedShard{dim, split_factor};
    }
    if (take("P")) {
      expect("(");
      const PartialOp op = partial_op();
      expect(")");
      return Partial{op};
    }
    fail();
  }

  bool take(std::string_view part) {
    skip_spaces();
    if (!rest_.starts_with(part)) return false;
    rest_.remove_prefix(part.size());
    return true;
  }

  void expect(std::string_view part) {
    if (!take(part)) fail();
  }

  void expect_end() {
    skip_spaces();
    if (!rest_.empty()) fail();
  }

 private:
  void skip_spaces() {
    while (rest_.starts_with(' ')) rest_.remove_prefix(1);
  }

  std::int64_t number() {
    skip_spaces();
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    if (error != std::errc{}) fail();
    rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
    return value;
  }

  PartialOp partial_op() {
    for (const PartialOp op : kPartialOps)
      if (take(to_text(op))) return op;
    fail();
  }

  [[noreturn]] void fail() const {
    throw ConfigError(describe(
        "placement", fmt::format("\"{}\"", whole_),
        "R, S(dim), _S(dim, split factor) or P(sum|avg|min|max|product)",
        rest_.empty() ? std::string("the text ends too early") : fmt::format("check \"{}\"", rest_)));
  }

  std::string_view whole_, rest_;
};

}  // namespace

std::string_view to_text(PartialOp op) {
  switch (op) {
    case PartialOp::Sum:
      return "sum";
    case PartialOp::Avg:
      return "avg";
    case PartialOp::Min:
      return "min";
    case PartialOp::Max:
      return "max";
    case PartialOp::Product:
      return "product";
  }
  throw InvariantError(fmt::format("PartialOp {} has no name", static_cast<int>(op)));
}

std::int64_t Placement::dim() const {
  if (const auto* shard = std::get_if<Shard>(&value_)) return shard->dim;
  if (const auto* shard = std::get_if<StridedShard>(&value_)) return shard->dim;
  throw StateError(describe("dim of a placement", to_string(), "a shard", "check splits() first"));
}

std::int64_t Placement::split_factor() const {
  if (const auto* shard = std::get_if<StridedShard>(&value_)) return shard->split_factor;
  throw StateError(describe("split factor of a placement", to_string(), "a strided shard",
                            "check is_strided_shard() first"));
}

PartialOp Placement::partial_op() const {
  if (const auto* partial = std::get_if<Partial>(&value_)) return partial->op;
  throw StateError(
      describe("operation of a placement", to_string(), "a partial placement", "check is_partial() first"));
}

std::string Placement::to_string() const {
  if (const auto* shard = std::get_if<Shard>(&value_)) return fmt::format("S({})", shard->dim);
  if (const auto* shard = std::get_if<StridedShard>(&value_))
    return fmt::format("_S({}, {})", shard->dim, shard->split_factor);
  if (const auto* partial = std::get_if<Partial>(&value_)) return fmt::format("P({})", to_text(partial->op));
  return "R";
}

std::string to_string(const Placements& placements) {
  std::string text;
  for (const Placement& placement : placements) text += (text.empty() ? "" : ", ") + placement.to_string();
  return "[" + text + "]";
}

Placement parse_placement(std::string_view text) {
  Reader reader(text);
  const Placement placement = reader.placement();
  reader.expect_end();
  return placement;
}

Placements parse_placements(std::string_view text) {
  Reader reader(text);
  Placements placements;
  reader.expect("[");
  if (!reader.take("]")) {
    do placements.push_back(reader.placement());
    while (reader.take(","));
    reader.expect("]");
  }
  reader.expect_end();
  return placements;
}

Placements normalize_placements(const Placements& placements, int mesh_ndim, std::int64_t tensor_ndim) {
  if (static_cast<std::int64_t>(placements.size()) != mesh_ndim)
    throw ValueError(describe(
        "placements", fmt::format("{}, {} of them", to_string(placements), placements.size()),
        fmt::format("{}, one per mesh axis", mesh_ndim), "use R for an axis that holds the whole tensor"));
  Placements normalized = placements;
  for (std::size_t axis = 0; axis < normalized.size(); ++axis) {
    const Placement& placement = placements[axis];
    if (!placement.splits()) continue;
    if (placement.dim() < -tensor_ndim || placement.dim() >= tensor_ndim)
      throw ValueError(describe(fmt::format("placement of mesh axis {}", axis), placement.to_string(),
                                tensor_ndim == 0
                                    ? std::string("no shard, since the tensor has no dims")
                                    : fmt::format("a dim from {} to {}", -tensor_ndim, tensor_ndim - 1),
                                "shard a dim that the tensor has, or replicate"));
    const std::int64_t dim = placement.dim() < 0 ? placement.dim() + tensor_ndim : placement.dim();
    if (placement.is_shard()) {
      normalized[axis] = Shard{dim};
      continue;
    }
    if (placement.split_factor() < 1)
      throw ValueError(describe(fmt::format("placement of mesh axis {}", axis), placement.to_string(),
                                "a split factor of at least 1",
                                "use the number of pieces that the axes to the right make"));
    normalized[axis] = StridedShard{dim, placement.split_factor()};
  }
  return normalized;
}

}  // namespace penstock

std::size_t std::hash<penstock::Placement>::operator()(const penstock::Placement& placement) const noexcept {
  penstock::HashBuilder hash;
  const auto& value = placement.variant();
  hash.add(value.index());
  if (const auto* shard = std::get_if<penstock::Shard>(&value)) hash.add(shard->dim);
  if (const auto* shard = std::get_if<penstock::StridedShard>(&value))
    hash.add(shard->dim).add(shard->split_factor);
  if (const auto* partial = std::get_if<penstock::Partial>(&value)) hash.add(static_cast<int>(partial->op));
  return hash.value();
}

std::size_t std::hash<penstock::Placements>::operator()(
    const penstock::Placements& placements) const noexcept {
  penstock::HashBuilder hash;
  hash.add(placements.size());
  for (const penstock::Placement& placement : placements) hash.add(placement);
  return hash.value();
}
