// Integers that cannot be swapped by mistake: a Rank is not a StageId is not a MicrobatchId.
//
// Construction is explicit, the value is read with `value()`; equality, order and hash work as for the integer.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <ostream>

namespace penstock {

template <class Tag>
class StrongId {
 public:
  constexpr StrongId() = default;
  constexpr explicit StrongId(std::int32_t value) : value_(value) {}
  constexpr std::int32_t value() const { return value_; }
  constexpr auto operator<=>(const StrongId&) const = default;

  friend std::ostream& operator<<(std::ostream& out, StrongId id) { return out << id.value_; }

 private:
  std::int32_t value_ = 0;
};

// Position of a process in the whole world. Positions within a group or a mesh axis are plain `axis_rank` integers.
using Rank = StrongId<struct RankTag>;
using StageId = StrongId<struct StageTag>;
using MicrobatchId = StrongId<struct MicrobatchTag>;

}  // namespace penstock

template <class Tag>
struct std::hash<penstock::StrongId<Tag>> {
  std::size_t operator()(penstock::StrongId<Tag> id) const noexcept { return std::hash<std::int32_t>{}(id.value()); }
};
