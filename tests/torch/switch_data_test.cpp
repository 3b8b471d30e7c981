// A leaf that is switched to another tensor and back while graphs, hooks and optimizers hold it.
#include "penstock/torch/dispatch/switch_data.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

#include "penstock/errors.h"
#include "tests/torch/sample_wrappers.h"

namespace penstock {
namespace switch_data_test {

using sample::Boxed;

TEST(SwitchData, ForEveryHandle) {
  at::Tensor leaf = at::zeros({2, 3}).requires_grad_(true);
  const at::Tensor handle = leaf;
  const void* impl = leaf.unsafeGetTensorImpl();
  const at::Tensor other = at::ones({2, 3}, at::kDouble);
  {
    const at::NoGradGuard no_grad;
    switch_data(leaf, other);
  }
  EXPECT_EQ(handle.unsafeGetTensorImpl(), impl);
  EXPECT_EQ(handle.scalar_type(), at::kDouble);
  EXPECT_EQ(handle.data_ptr(), other.data_ptr()) << "memory is shared, not copied";
  EXPECT_TRUE(handle.requires_grad());
  EXPECT_TRUE(handle.is_leaf());
}

TEST(SwitchData, BetweenPlainAndWrapperManyTimes) {
  const at::Tensor plain = at::randn({2, 2}), inner = at::randn({2, 2});
  at::Tensor leaf = plain.clone().requires_grad_(true);
  const at::Tensor handle = leaf, boxed = Boxed::make(inner);
  for (int i = 0; i < 3; ++i) {
    const at::NoGradGuard no_grad;
    switch_data(leaf, boxed);
    ASSERT_TRUE(is_wrapper(handle));
    EXPECT_TRUE(at::equal(payload_as<Boxed>(handle + 0)->inner, inner));
    switch_data(leaf, plain);
    ASSERT_FALSE(is_wrapper(handle));
    EXPECT_TRUE(at::equal(handle + 0, plain));
  }
  EXPECT_TRUE(handle.requires_grad());
}

// The version counter is that of the leaf: what autograd saved before stays valid, and later writes are
// detected.
TEST(SwitchData, GraphsStayValid) {
  at::Tensor leaf = at::full({3}, 2.0).requires_grad_(true);
  const at::Tensor whole = at::full({3}, 2.0), part = Boxed::make(at::zeros({3}));
  const auto version = leaf._version();
  const at::Tensor y = leaf * leaf;
  {
    const at::NoGradGuard no_grad;
    switch_data(leaf, part);
    switch_data(leaf, whole);
  }
  EXPECT_EQ(leaf._version(), version);
  y.sum().backward();
  EXPECT_TRUE(at::equal(leaf.grad(), at::full({3}, 4.0)));
}

TEST(SwitchData, GradientsHooksAndAccumulatorsStay) {
  at::Tensor leaf = at::ones({2}).requires_grad_(true);
  int hooks = 0;
  leaf.register_hook([&](const at::Tensor&) { ++hooks; });
  leaf.mutable_grad() = at::full({2}, 5.0);
  const at::Tensor y = leaf * 3;  // holds the accumulator of the leaf
  {
    const at::NoGradGuard no_grad;
    switch_data(leaf, at::full({2}, 7.0));
  }
  const at::Tensor z = leaf * 2;
  (y + z).sum().backward();
  EXPECT_EQ(hooks, 1) << "one accumulator for both uses";
  EXPECT_TRUE(at::equal(leaf.grad(), at::full({2}, 10.0)));
}

TEST(SwitchData, SizesMustBeTheSame) {
  const at::Tensor leaf = at::ones({2});
  EXPECT_THROW(switch_data(leaf, at::ones({3})), InvariantError);
  EXPECT_EQ(leaf.numel(), 2);
}

TEST(TieLifetime, LastsAsLongAsTheTensor) {
  auto object = std::make_shared<int>(3);
  const std::weak_ptr<int> watch = object;
  at::Tensor leaf = at::ones({2}), frozen = at::ones({2});
  leaf.set_requires_grad(true);
  tie_lifetime(leaf, object);
  tie_lifetime(frozen, object);
  object.reset();
  EXPECT_TRUE(leaf.requires_grad());
  EXPECT_FALSE(frozen.requires_grad()) << "unchanged";
  {
    const at::NoGradGuard no_grad;
    switch_data(leaf, Boxed::make(at::zeros({2})));
    switch_data(leaf, at::zeros({2}));
  }
  (leaf * 2).sum().backward();
  EXPECT_TRUE(at::equal(leaf.grad(), at::full({2}, 2.0))) << "gradients are left alone";
  frozen.reset();
  EXPECT_FALSE(watch.expired());
  leaf.reset();
  EXPECT_TRUE(watch.expired());
}

}  // namespace switch_data_test
}  // namespace penstock
