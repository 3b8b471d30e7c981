// What a record that goes to another process says about a mesh: names and layout, never ranks.
//
// All stages of a pipeline derive their meshes from one list of ranks, the universe. Within it a sender and a
// receiver on different ranks have meshes of equal key (both hold "tp" with stride 1), each with its own
// ranks; so the receiver finds its own mesh by the key. Between meshes of different universes keys mean
// nothing.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "penstock/mesh_layout.h"

namespace penstock {

struct MeshKey {
  std::vector<std::string> names;    // empty for a mesh without names
  std::optional<MeshLayout> layout;  // nothing: the names alone must do
  friend bool operator==(const MeshKey&, const MeshKey&) = default;

  // "[dp, tp] (2, 4):(4, 1)".
  std::string to_string() const;
};

}  // namespace penstock

template <>
struct std::hash<penstock::MeshKey> {
  std::size_t operator()(const penstock::MeshKey& key) const noexcept;
};
