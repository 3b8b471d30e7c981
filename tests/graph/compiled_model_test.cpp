// The transformer of this project as a captured graph.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/compile.h"
#include "penstock/graph/run/compiled_module_internals.h"
#include "penstock/transformer.h"
#include "tests/models/small_model.h"

namespace penstock::graph {
namespace compiled_model_test {

using namespace models;
using namespace models::test;

// Two training steps, captured and replayed, match the plain model bit for bit.
void expect_same_steps(bool tied, bool with_documents) {
  TransformerStage plain = made(small(tied)), original = made(small(tied));
  auto fast = compile(original);
  for (int step = 0; step < 2; ++step) {
    SCOPED_TRACE(step);
    const at::Tensor tokens = tokens_for(small(), 2, 9);
    const at::Tensor documents =
        with_documents ? torch::arange(18).reshape({2, 9}).div(4, "floor") : at::Tensor();
    const auto logits_of = [&](auto& model) { return model->forward(tokens, documents); };
    const at::Tensor expected = logits_of(plain), actual = logits_of(fast);
    EXPECT_TRUE(torch::equal(actual, expected));
    for (const at::Tensor& logits : {expected, actual}) logits.pow(2).mean().backward();
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
      const at::Tensor a = original->parameters()[i], b = plain->parameters()[i];
      ASSERT_TRUE(a.grad().defined()) << plain->named_parameters().keys()[i];
      EXPECT_TRUE(torch::equal(a.grad(), b.grad())) << plain->named_parameters().keys()[i];
      a.sub_(a.grad(), 0.1);
      b.sub_(b.grad(), 0.1);
    }
  }
  EXPECT_EQ(compiled_entry(*fast, 0).captures(), 1u);
  EXPECT_EQ(count_writes(compiled_entry(*fast, 0).joint(0).graph), 0u);
}

TEST(CompiledModel, Transformer) { expect_same_steps(false, false); }
TEST(CompiledModel, TransformerWithTiedHead) { expect_same_steps(true, false); }
TEST(CompiledModel, TransformerWithDocuments) { expect_same_steps(false, true); }

}  // namespace compiled_model_test
}  // namespace penstock::graph
