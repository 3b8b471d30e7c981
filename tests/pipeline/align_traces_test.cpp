// Traces of one module that differ are aligned: in order, only equal operators, and as many as possible.
#include "penstock/pipeline/traced/align_traces.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "tests/graph/traced_module.h"

namespace penstock {
namespace align_traces_test {

using graph::ForwardTrace;

// Runs operators by number; some take a parameter.
struct Program : torch::nn::Module {
  Program() {
    a = register_parameter("a", at::ones({3}));
    b = register_parameter("b", at::ones({3}));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (const int op : ops) switch (op) {
        case 0:
          y = y.sin();
          break;
        case 1:
          y = y.cos();
          break;
        case 2:
          y = y * a;
          break;
        case 3:
          y = y * b;
          break;
        default:
          y = y * 0.5;
          break;
      }
    return y;
  }
  std::vector<int> ops;
  at::Tensor a, b;
};

ForwardTrace traced(std::vector<int> ops) {
  const auto program = std::make_shared<Program>();
  program->ops = std::move(ops);
  return graph::traced_module::traced(program, at::ones({2, 3})).trace;
}

// The length of a longest common subsequence.
std::size_t common(const std::vector<int>& a, const std::vector<int>& b) {
  std::vector<std::vector<std::size_t>> best(a.size() + 1, std::vector<std::size_t>(b.size() + 1, 0));
  for (std::size_t i = 0; i < a.size(); ++i)
    for (std::size_t j = 0; j < b.size(); ++j)
      best[i + 1][j + 1] = a[i] == b[j] ? best[i][j] + 1 : std::max(best[i][j + 1], best[i + 1][j]);
  return best[a.size()][b.size()];
}

TEST(AlignTraces, AsManyEqualOperatorsAsPossible) {
  std::mt19937_64 dice(5);
  for (int round = 0; round < 300; ++round) {
    const auto random_ops = [&](std::size_t most) {
      std::vector<int> ops(1 + dice() % most);
      for (int& op : ops) op = static_cast<int>(dice() % 5);
      return ops;
    };
    const std::vector<int> a = random_ops(24);
    std::vector<int> b = a;
    // Half of them are unrelated, the others have a few operators more or less.
    if (round % 2 == 0) {
      b = random_ops(24);
    } else {
      for (int change = 0; change < 4; ++change) {
        const auto at = static_cast<std::ptrdiff_t>(dice() % b.size());
        if (dice() % 2 == 0 && b.size() > 1)
          b.erase(b.begin() + at);
        else
          b.insert(b.begin() + at, static_cast<int>(dice() % 5));
      }
    }
    const std::vector<std::size_t> aligned = aligned_nodes(traced(a), traced(b));
    ASSERT_EQ(aligned.size(), a.size());
    std::size_t count = 0, next = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (aligned[i] == kNotAligned) continue;
      ASSERT_GE(aligned[i], next) << "out of order";
      ASSERT_LT(aligned[i], b.size());
      EXPECT_EQ(a[i], b[aligned[i]]);
      next = aligned[i] + 1;
      ++count;
    }
    EXPECT_EQ(count, common(a, b));
  }
}

// What a trace has in addition does not take the place of its equal neighbour: the operators that made the
// arguments tell.
TEST(AlignTraces, NeighboursOfTheSameOperator) {
  // sin, then a multiplication by a number twice; the other trace has one, of the sine.
  const std::vector<std::size_t> after = aligned_nodes(traced({0, 4, 4, 1}), traced({0, 4, 1}));
  EXPECT_EQ(after[1], 1u);
  EXPECT_EQ(after[2], kNotAligned);
  EXPECT_EQ(after[3], 2u);
}

}  // namespace align_traces_test
}  // namespace penstock
