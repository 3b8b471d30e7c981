// Randomly generated functions over distributed tensors, the same on every rank for a given seed.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <random>
#include <vector>

#include "tests/graph/dtensor_compare.h"

namespace penstock::graph {

// Over two square tensors: operators, views, writes to intermediate tensors and, if `writes`, to an input,
// and redistributions.
inline Function random_dtensor_function(std::uint32_t seed, std::int64_t width, bool writes) {
  return [=](const Values& in) -> Values {
    std::mt19937 random(seed);
    std::vector<at::Tensor> made{in[0].toTensor(), in[1].toTensor()};
    const auto pick = [&]() -> const at::Tensor& { return made[random() % made.size()]; };
    const auto layout = [&]() -> Placements {
      const std::uint32_t which = random() % 3;
      return {which == 0 ? Placement(Replicate{}) : Placement(Shard{static_cast<std::int64_t>(which) - 1})};
    };
    if (writes) made[random() % 2].mul_(0.5).add_(1);
    for (int step = 0; step < 7; ++step) {
      const at::Tensor a = pick(), b = pick();
      const auto at_row = static_cast<std::int64_t>(random() % static_cast<std::uint32_t>(width));
      switch (random() % 14) {
        case 0:
          made.push_back(a + b);
          break;
        case 1:
          made.push_back(a * b.sin());
          break;
        case 2:
          made.push_back(a.matmul(b));
          break;
        case 3:
          made.push_back(at::softmax(a, static_cast<std::int64_t>(random() % 2)));
          break;
        case 4:
          made.push_back(a.t());
          break;
        case 5:
          made.push_back(redistribute(a, layout()));
          break;
        case 6:
          made.push_back(at::layer_norm(a, {width}));
          break;
        case 7:
          made.push_back(a - a.mean({static_cast<std::int64_t>(random() % 2)}, /*keepdim=*/true));
          break;
        case 8:
          made.push_back((a * 2).mul_(b));
          break;
        case 9:
          made.push_back(a.view({width * width}).view({width, width}).relu());
          break;
        case 10:
          made.push_back(at::cat({a.narrow(0, at_row, width - at_row), b.narrow(0, 0, at_row)}, 0));
          break;
        case 11:
          made.push_back(a.cumsum(0));
          break;
        case 12:
          made.push_back(a.select(0, at_row).unsqueeze(0) * b);
          break;
        default:
          made.push_back(at::where(a > 0, a, b));
          break;
      }
    }
    return {made.back(), made[made.size() - 2], made[made.size() - 3].sum()};
  };
}

// A function and what it is called with, on a mesh of one axis.
struct RandomDTensorProgram {
  RandomDTensorProgram(std::uint32_t seed, const comm::MeshGroups& mesh)
      : seed(seed), mesh(mesh), writes(seed % 5 == 0), function(random_dtensor_function(seed, 4, writes)) {}

  std::vector<at::Tensor> inputs(int step) const {
    const std::vector<Placement> layouts{Replicate{}, Shard{0}, Shard{1}, Partial{}};
    std::vector<at::Tensor> all;
    for (std::uint32_t i = 0; i < 2; ++i)
      all.push_back(placed(numbers({4, 4}, static_cast<int>(seed + 100 * i) + 1000 * step), mesh,
                           layouts[(seed * 7 + i * 3 + seed / 4) % 4], !writes));
    return all;
  }
  // Whether the plain run accepts it: it rejects a write to terms of a sum, or a view that would need
  // communication.
  bool is_legal() const {
    try {
      const std::vector<at::Tensor> all = inputs(0);
      function(Values(all.begin(), all.end()));
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

  std::uint32_t seed;
  comm::MeshGroups mesh;
  bool writes;
  Function function;
};

}  // namespace penstock::graph
