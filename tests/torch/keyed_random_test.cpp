#include "penstock/random.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

#include "penstock/base/philox.h"
#include "penstock/errors.h"
#include "tests/has_text.h"
#include "tests/torch/random_cases.h"

#ifdef PENSTOCK_HAVE_RAPIDCHECK
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>
#endif

namespace penstock {
namespace keyed_random_test {

using test::bits_of;
using test::box_cases;
using test::fill_cases;
using test::has_text;
using test::make_tensor;
using test::part_of;
using test::same_bits;
using test::Sizes;
using test::test_key;

// --------------------------------------------------------------------------------------------------- same
// values anywhere

std::int64_t elements(const Sizes& sizes) {
  std::int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return count;
}

TEST(KeyedRandom, ABoxHoldsItsPartOfTheWhole) {
  for (const auto& function : fill_cases())
    for (const auto dtype : function.dtypes) {
      for (const auto& one : box_cases()) {
        if (elements(one.global) > 1 << 20)
          continue;  // the whole tensor would not fit in memory: see the next test
        at::Tensor whole = at::empty(one.global, dtype);
        function.fill(whole, test_key(), {});
        for (const auto memory : test::kMemories) {
          at::Tensor part = make_tensor(one.sizes, dtype, memory);
          function.fill(part, test_key(), one.box());
          ASSERT_TRUE(same_bits(part, part_of(whole, one.offset, one.sizes)))
              << function.name << " " << dtype << " global " << whole.sizes() << " part " << part.sizes()
              << " memory " << static_cast<int>(memory);
        }
      }
    }
}

// Element by element from Philox, for boxes of any global size.
TEST(KeyedRandom, BernoulliIsTheWordOfTheGlobalIndex) {
  const auto key = test_key();
  const auto stream = philox::derive(key.seed, 7, 3, 12, static_cast<philox::u64>(key.purpose));
  for (const auto& one : box_cases()) {
    at::Tensor part = at::empty(one.sizes, at::kBool);
    keyed_bernoulli_(part, key, 0.5, one.box());
    const at::Tensor flat = part.flatten();
    for (std::int64_t i = 0; i<flat.numel(); i += flat.numel()> 3000 ? 97 : 1) {
      std::int64_t rest = i, global = 0, stride = 1;
      for (std::size_t d = one.sizes.size(); d-- > 0;) {
        global += (one.offset[d] + rest % one.sizes[d]) * stride;
        rest /= one.sizes[d];
        stride *= one.global[d];
      }
      const auto word = philox::numbers(stream, static_cast<philox::u64>(global / 4)).word[global % 4];
      ASSERT_EQ(flat[i].item<bool>(), word < 0x80000000u) << "global index " << global;
    }
  }
}

TEST(KeyedRandom, ChannelsLastMemoryHoldsTheSameValues) {
  at::Tensor plain = at::empty({3, 4, 5, 6}),
             channels_last = at::empty({3, 4, 5, 6}, at::MemoryFormat::ChannelsLast);
  keyed_normal_(plain, test_key(), 0, 1);
  keyed_normal_(channels_last, test_key(), 0, 1);
  ASSERT_FALSE(channels_last.is_contiguous());
  EXPECT_TRUE(same_bits(plain, channels_last));
}

TEST(KeyedRandom, OnlyTheElementsOfTheTensorAreWritten) {
  for (const auto& function : fill_cases())
    for (const auto dtype : function.dtypes) {
      at::Tensor memory = at::full({3 * 7 * 2 + 9}, dtype == at::kBool ? 1 : 77, dtype);
      at::Tensor before = memory.clone();
      at::Tensor inner = memory.narrow(0, 4, 3 * 7 * 2).view({3, 7, 2}).select(2, 0);
      function.fill(inner, test_key(), {{30, 70}, {9, 13}});
      inner.copy_(before.narrow(0, 4, 3 * 7 * 2).view({3, 7, 2}).select(2, 0));
      EXPECT_TRUE(same_bits(memory, before)) << function.name << " " << dtype;
    }
}

TEST(KeyedRandom, DtypesHoldTheSameValuesRoundedOnce) {
  for (const auto& function : fill_cases()) {
    if (function.dtypes.size() < 4 || function.name == "dropout") continue;
    at::Tensor single = at::empty({100, 33});
    function.fill(single, test_key(), {});
    for (const auto dtype : {at::kDouble, at::kBFloat16, at::kHalf}) {
      at::Tensor other = at::empty({100, 33}, dtype);
      function.fill(other, test_key(), {});
      EXPECT_TRUE(same_bits(other, single.to(dtype))) << function.name << " " << dtype;
    }
  }
}

TEST(KeyedRandom, AnyNumberOfThreads) {
  const int before = at::get_num_threads();
  at::Tensor one = at::empty({300001}), several = at::empty({300001});
  at::set_num_threads(1);
  keyed_normal_(one, test_key(), 0, 1);
  at::set_num_threads(5);
  keyed_normal_(several, test_key(), 0, 1);
  at::set_num_threads(before);
  EXPECT_TRUE(same_bits(one, several));
}

TEST(KeyedRandom, CallsFromManyThreadsDoNotDisturbEachOther) {
  at::Tensor expected = at::empty({5000});
  keyed_normal_(expected, test_key(), 0, 1);
  std::vector<at::Tensor> results(8);
  std::vector<std::thread> threads;
  for (auto& result : results)
    threads.emplace_back([&result] {
      result = at::empty({5000});
      for (int i = 0; i < 20; ++i) keyed_normal_(result, test_key(), 0, 1);
    });
  for (auto& thread : threads) thread.join();
  for (const auto& result : results) EXPECT_TRUE(same_bits(result, expected));
}

TEST(KeyedRandom, SubnormalsFlushedToZeroChangeNothing) {
  at::Tensor kept = at::empty({20000}), flushed = at::empty({20000});
  keyed_normal_(kept, test_key(), 0, 1);
  at::globalContext().setFlushDenormal(true);
  keyed_normal_(flushed, test_key(), 0, 1);
  at::globalContext().setFlushDenormal(false);
  EXPECT_TRUE(same_bits(kept, flushed));
}

TEST(KeyedRandom, EveryPartOfTheKeyCounts) {
  const RandomKey base = test_key();
  std::vector<RandomKey> keys(6, base);
  keys[1].seed += 1, keys[2].step += 1, keys[3].microbatch += 1, keys[4].layer += 1, keys[5].purpose += 1;
  std::vector<at::Tensor> all;
  for (const auto& key : keys) keyed_normal_(all.emplace_back(at::empty({2000})), key, 0, 1);
  for (std::size_t i = 0; i < all.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      EXPECT_LT(std::abs((all[i] * all[j]).mean().item<double>()), 4 / std::sqrt(2000.0))
          << i << " and " << j;
}

// Pinned values. A change here changes every model that was ever started with a seed.
TEST(KeyedRandom, ValuesNeverChange) {
  const auto first = [](const auto& fill, at::ScalarType dtype) {
    at::Tensor tensor = at::empty({6}, dtype);
    fill(tensor);
    std::vector<std::int64_t> bits;
    for (int i = 0; i < 6; ++i) bits.push_back(bits_of(tensor)[i].template item<std::int64_t>());
    return bits;
  };
  using Bits = std::vector<std::int64_t>;
  const auto uniform = first([](const at::Tensor& t) { keyed_uniform_(t, test_key(), 0, 1); }, at::kFloat);
  const auto normal = first([](const at::Tensor& t) { keyed_normal_(t, test_key(), 0, 1); }, at::kFloat);
  const auto truncated =
      first([](const at::Tensor& t) { keyed_trunc_normal_(t, test_key(), 0, 1, -2, 2); }, at::kFloat);
  const auto wide = first(
      [](const at::Tensor& t) { keyed_normal_(t, test_key(), 0, 1, {}, Precision::Double); }, at::kDouble);
  EXPECT_EQ(uniform, (Bits{1063482514, 1062526603, 1059576422, 1056820198, 1063715539, 1060204762}));
  EXPECT_EQ(normal, (Bits{1067186767, 1064685351, 1053632360, -1137655714, 1067830140, 1057044083}));
  EXPECT_EQ(truncated, (Bits{1066446079, 1063706832, 1052989230, -1138182788, 1066994222, 1056289230}));
  EXPECT_EQ(wide, (Bits{4608166799538195242, 4600889831713403641, 4608512208162509689, 4602729791236829199,
                        -4612574195073335116, -4619124740605080563}));
}

TEST(KeyedRandom, LayersByName) {
  EXPECT_EQ(layer_from_name(""), static_cast<std::int64_t>(0xcbf29ce484222325u));
  EXPECT_EQ(layer_from_name("a"),
            static_cast<std::int64_t>(0xaf63dc4c8601ec8cu));  // published value of FNV-1a
  EXPECT_NE(layer_from_name("blocks.1.weight"), layer_from_name("blocks.2.weight"));
}

#ifdef PENSTOCK_HAVE_RAPIDCHECK
// Cut a random tensor at random positions into boxes: together they equal the tensor filled at once.
RC_GTEST_PROP(KeyedRandomProperty, BoxesPutTogetherAreTheWhole, ()) {
  const auto dims = *rc::gen::inRange(1, 5);
  Sizes shape;
  for (int d = 0; d < dims; ++d) shape.push_back(*rc::gen::inRange(1, dims < 3 ? 60 : 9));
  const auto& function = fill_cases()[*rc::gen::inRange<std::size_t>(0, fill_cases().size())];
  const auto dtype = function.dtypes[*rc::gen::inRange<std::size_t>(0, function.dtypes.size())];
  const RandomKey key{.seed = *rc::gen::arbitrary<std::uint64_t>(),
                      .step = *rc::gen::arbitrary<std::int64_t>(),
                      .layer = *rc::gen::arbitrary<std::int64_t>()};
  at::Tensor whole = at::empty(shape, dtype), joined = at::empty(shape, dtype);
  function.fill(whole, key, {});
  std::vector<Sizes> cuts;  // for each dim, where its pieces start
  for (const auto size : shape) {
    Sizes starts = {0, *rc::gen::inRange<std::int64_t>(0, size), *rc::gen::inRange<std::int64_t>(0, size),
                    size};
    std::sort(starts.begin(), starts.end());
    cuts.push_back(starts);
  }
  for (int piece = 0; piece < static_cast<int>(std::pow(3, dims)); ++piece) {
    Sizes offset, sizes;
    for (int d = 0, rest = piece; d < dims; ++d, rest /= 3) {
      const auto& starts = cuts[static_cast<std::size_t>(d)];
      const auto at = static_cast<std::size_t>(rest % 3);
      offset.push_back(starts[at]);
      sizes.push_back(starts[at + 1] - starts[at]);
    }
    at::Tensor part = make_tensor(sizes, dtype,
                                  *rc::gen::elementOf(std::vector<test::Memory>(std::begin(test::kMemories),
                                                                                std::end(test::kMemories))));
    function.fill(part, key, {shape, offset});
    part_of(joined, offset, sizes).copy_(part);
  }
  RC_ASSERT(at::equal(bits_of(whole), bits_of(joined)));
}
#endif

// --------------------------------------------------------------------------------------------------------
// distributions

// The Kolmogorov distance between a sample and a distribution function, times the root of the size: above
// 1.95 once in a thousand samples of the correct distribution. Seeds are fixed, so a failure is a defect, not
// chance.
double kolmogorov(const at::Tensor& sample, const std::function<double(double)>& distribution) {
  const at::Tensor sorted = std::get<0>(sample.flatten().to(at::kDouble).sort());
  const double* values = sorted.data_ptr<double>();
  const auto n = static_cast<double>(sorted.numel());
  double distance = 0;
  for (std::int64_t i = 0; i < sorted.numel(); ++i) {
    const double expected = distribution(values[i]);
    distance = std::max({distance, std::abs(expected - static_cast<double>(i) / n),
                         std::abs(expected - static_cast<double>(i + 1) / n)});
  }
  return distance * std::sqrt(n);
}

double normal_distribution(double x) { return std::erfc(-x / std::sqrt(2.0)) / 2; }

constexpr std::int64_t kSample = 1 << 18;

TEST(Distribution, Uniform) {
  for (const auto precision : {Precision::Single, Precision::Double}) {
    at::Tensor x = at::empty({kSample}, at::kDouble);
    keyed_uniform_(x, test_key(), -2, 3, {}, precision);
    EXPECT_LT(kolmogorov(x, [](double v) { return (v + 2) / 5; }), 1.95);
    EXPECT_NEAR(x.mean().item<double>(), 0.5, 5 * 1.4434 / 512);
    EXPECT_NEAR(x.var().item<double>(), 25.0 / 12, 0.02);
    EXPECT_GE(x.min().item<double>(), -2);
    EXPECT_LT(x.max().item<double>(), 3);
  }
}

TEST(Distribution, UniformNeverReachesItsUpperBound) {
  at::Tensor x = at::empty({1 << 20});
  for (const auto& [low, high] : std::vector<std::pair<double, double>>{
           {0, 1}, {1, 1 + 0x1p-22}, {-1, -1 + 0x1p-23}, {1e6, 1e6 + 1}, {-1e-30, 1e-30}}) {
    keyed_uniform_(x, test_key(), low, high);
    EXPECT_GE(x.min().item<double>(), static_cast<double>(static_cast<float>(low))) << low;
    EXPECT_LT(x.max().item<double>(), static_cast<double>(static_cast<float>(high))) << high;
  }
  keyed_uniform_(x, test_key(), 3, 3);
  EXPECT_TRUE((x == 3).all().item<bool>());
}

TEST(Distribution, Normal) {
  for (const auto precision : {Precision::Single, Precision::Double}) {
    at::Tensor x = at::empty({kSample}, at::kDouble);
    keyed_normal_(x, test_key(), 1, 2, {}, precision);
    EXPECT_LT(kolmogorov(x, [](double v) { return normal_distribution((v - 1) / 2); }), 1.95);
    const at::Tensor z = (x - 1) / 2;
    EXPECT_NEAR(z.mean().item<double>(), 0, 5.0 / 512);
    EXPECT_NEAR(z.pow(2).mean().item<double>(), 1, 5 * 1.4143 / 512);
    EXPECT_NEAR(z.pow(3).mean().item<double>(), 0, 5 * 3.873 / 512);
    EXPECT_NEAR(z.pow(4).mean().item<double>(), 3, 5 * 9.798 / 512);
    // Neighbours within a Philox block and across blocks are uncorrelated.
    for (const std::int64_t lag : {1, 2, 3, 4, 5, 128})
      EXPECT_NEAR((z.narrow(0, 0, kSample - lag) * z.narrow(0, lag, kSample - lag)).mean().item<double>(), 0,
                  5.0 / 512)
          << "lag " << lag;
  }
}

TEST(Distribution, TruncatedNormal) {
  for (const auto precision : {Precision::Single, Precision::Double})
    for (const auto& [low, high] : std::vector<std::pair<double, double>>{
             {-2, 2}, {0.5, 3}, {-1, 30}, {-3.5, -2.5}, {-std::numeric_limits<double>::infinity(), 0}}) {
      at::Tensor x = at::empty({kSample}, at::kDouble);
      keyed_trunc_normal_(x, test_key(), 1, 2, 1 + 2 * low, 1 + 2 * high, {}, precision);
      const double from = normal_distribution(low), to = normal_distribution(high);
      EXPECT_LT(
          kolmogorov(x, [&](double v) { return (normal_distribution((v - 1) / 2) - from) / (to - from); }),
          1.95)
          << low << " " << high;
      EXPECT_GE(x.min().item<double>(), 1 + 2 * low);
      EXPECT_LE(x.max().item<double>(), 1 + 2 * high);
    }
}

TEST(Distribution, ATruncationThatCutsNothingOffIsTheNormal) {
  at::Tensor cut = at::empty({1000}), plain = at::empty({1000});
  keyed_trunc_normal_(cut, test_key(), 0, 0.02, -2, 2);
  keyed_normal_(plain, test_key(), 0, 0.02);
  EXPECT_TRUE(same_bits(cut, plain));
}

TEST(Distribution, Bernoulli) {
  at::Tensor x = at::empty({kSample}, at::kBool);
  for (const double p : {0.001, 0.1, 0.5, 0.93}) {
    keyed_bernoulli_(x, test_key(), p);
    EXPECT_NEAR(x.to(at::kDouble).mean().item<double>(), p, 4 * std::sqrt(p * (1 - p)) / 512) << p;
  }
  keyed_bernoulli_(x, test_key(), 0);
  EXPECT_EQ(x.sum().item<std::int64_t>(), 0);
  keyed_bernoulli_(x, test_key(), 1);
  EXPECT_EQ(x.sum().item<std::int64_t>(), kSample);
}

// --------------------------------------------------------------------------------------------------------------
// dropout

TEST(KeyedDropoutFunction, KeepsAndScales) {
  for (const auto dtype : test::floating_dtypes())
    for (const double p : {0.0, 0.1, 0.5, 0.9, 1.0}) {
      at::Tensor x = at::empty({200, 31}, dtype);
      keyed_normal_(x, {.seed = 1}, 0, 3);
      const at::Tensor y = keyed_dropout(x, p, test_key()), keep = keyed_keep_mask(x, p, test_key());
      const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
      const at::Tensor scaled = (x.to(wide) * at::full({}, p < 1 ? 1 / (1 - p) : 0, wide)).to(dtype);
      EXPECT_TRUE(same_bits(y, at::where(keep, scaled, at::zeros_like(scaled)))) << dtype << " " << p;
      EXPECT_NEAR(keep.to(at::kDouble).mean().item<double>(), 1 - p, 0.03);
    }
}

TEST(KeyedDropoutFunction, TheMaskIsThatOfEveryDtypeAndLayout) {
  const at::Tensor x = at::ones({24, 30});
  const at::Tensor keep = keyed_keep_mask(x, 0.3, test_key());
  for (const auto dtype : test::floating_dtypes())
    for (const auto& one : std::vector<test::BoxCase>{
             {{24, 30}, {0, 0}, {24, 30}}, {{24, 30}, {6, 0}, {6, 30}}, {{24, 30}, {5, 7}, {11, 13}}})
      for (const auto memory : test::kMemories) {
        const at::Tensor part = make_tensor(one.sizes, dtype, memory).fill_(1);
        const at::Tensor y = keyed_dropout(part, 0.3, test_key(), one.box());
        EXPECT_TRUE(at::equal(y != 0, part_of(keep, one.offset, one.sizes))) << dtype;
      }
}

TEST(KeyedDropoutFunction, ReadsExpandedInputs) {
  const at::Tensor row = at::arange(1, 8, at::kFloat);
  EXPECT_TRUE(same_bits(keyed_dropout(row.expand({5, 7}), 0.4, test_key()),
                        keyed_dropout(row.expand({5, 7}).contiguous(), 0.4, test_key())));
}

TEST(KeyedDropoutFunction, DropsWhatIsNotANumber) {
  const at::Tensor keep = keyed_keep_mask(at::ones({100}), 0.5, test_key());
  const at::Tensor y =
      keyed_dropout(at::full({100}, std::numeric_limits<double>::quiet_NaN(), at::kFloat), 0.5, test_key());
  EXPECT_TRUE(at::equal(y.isnan(), keep));
  EXPECT_TRUE(at::equal(y == 0, keep.logical_not()));
}

TEST(KeyedDropoutFunction, DerivativeHasTheSameMaskAndSavesNothing) {
  for (const auto dtype : test::floating_dtypes()) {
    at::Tensor x = at::ones({40, 9}, dtype).requires_grad_();
    const GlobalBox box{{80, 9}, {40, 0}};
    const at::Tensor y = keyed_dropout(x, 0.25, test_key(), box);
    ASSERT_TRUE(y.requires_grad());
    const at::Tensor gradient = make_tensor({40, 9}, dtype, test::Memory::Reversed).fill_(2);
    y.backward(gradient);
    EXPECT_TRUE(same_bits(x.grad(), keyed_dropout(gradient, 0.25, test_key(), box))) << dtype;
  }
  // A graph keeps its input alive only if it saved it.
  at::Tensor x = at::ones({10}).requires_grad_();
  at::Tensor middle = x * 2;
  const at::Tensor y = keyed_dropout(middle, 0.25, test_key());
  EXPECT_EQ(middle.use_count(), 1);
}

TEST(KeyedDropoutFunction, SecondDerivative) {
  at::Tensor x = at::arange(1.0, 51.0, at::kDouble).requires_grad_();
  const at::Tensor y = keyed_dropout(x * x, 0.3, test_key());
  const at::Tensor first = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
  const at::Tensor second = torch::autograd::grad({first.sum()}, {x})[0];
  const at::Tensor scale = keyed_dropout(at::ones({50}, at::kDouble), 0.3, test_key());
  EXPECT_TRUE(at::allclose(first.detach(), 2 * x.detach() * scale));
  EXPECT_TRUE(at::allclose(second, 2 * scale));
}

// ---------------------------------------------------------------------------------------- as operators of
// the dispatcher

using Call = at::Tensor(const at::Tensor&, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef, double);

TEST(RandomOperators, ByName) {
  auto bernoulli =
      c10::Dispatcher::singleton().findSchemaOrThrow("penstock::keyed_bernoulli", "").typed<Call>();
  at::Tensor expected = at::empty({7, 3});
  keyed_bernoulli_(expected, test_key(), 0.4);
  EXPECT_TRUE(same_bits(bernoulli.call(at::ones({7, 3}), test_key().to_ints(), {}, {}, 0.4), expected));
  EXPECT_TRUE(has_text(
      c10::toString(c10::Dispatcher::singleton().findSchemaOrThrow("penstock::keyed_uniform_", "").schema()),
      "keyed_uniform_(Tensor(a!) self, int[] key, int[] global_shape, int[] offset, float low, float high, "
      "bool in_double=False) -> "));
}

TEST(RandomOperators, BoxedCallsReturnTheTensorThatWasFilled) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("penstock::keyed_normal_", "");
  const at::Tensor tensor = at::zeros({5});
  torch::jit::Stack stack = {
      tensor, test_key().to_ints(), std::vector<std::int64_t>(), std::vector<std::int64_t>(), 0.0, 1.0,
      false};
  op.callBoxed(&stack);
  ASSERT_EQ(stack.size(), 1u);
  EXPECT_TRUE(stack[0].toTensor().is_same(tensor));
  EXPECT_NE(tensor.abs().sum().item<double>(), 0);
}

TEST(RandomOperators, ShapeOnly) {
  const at::Tensor meta =
      at::empty({4, 6}, at::TensorOptions(at::kMeta).dtype(at::kBFloat16)).requires_grad_();
  const at::Tensor y = keyed_dropout(meta, 0.5, test_key());
  EXPECT_TRUE(y.is_meta());
  EXPECT_EQ(y.sizes(), meta.sizes());
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  const at::Tensor plain = at::empty({4, 6}, at::kMeta);
  keyed_normal_(plain, test_key(), 0, 1);
  keyed_trunc_normal_(plain, test_key(), 0, 1, -2, 2, {{8, 6}, {4, 0}});
  EXPECT_THROW(keyed_uniform_(plain, test_key(), 0, 1, {{8, 6}, {5, 0}}),
               ValueError);  // arguments are checked as in a real call
}

TEST(RandomOperators, AutogradKnowsOfTheWrite) {
  at::Tensor leaf = at::ones({4}).requires_grad_();
  EXPECT_THROW(keyed_uniform_(leaf, test_key(), 0, 1), c10::Error);
  {
    at::NoGradGuard no_grad;
    keyed_uniform_(leaf, test_key(), 0, 1);
  }
  // A value that backward needs was overwritten: an error, not a wrong gradient.
  at::Tensor x = at::ones({4}).requires_grad_();
  at::Tensor y = x.exp();
  at::Tensor loss = y.sum();
  keyed_uniform_(y.detach(), test_key(), 0, 1);
  EXPECT_THROW(loss.backward(), c10::Error);
  // Overwritten before it is used: no gradient passes through.
  at::Tensor z = x * 3;
  keyed_normal_(z, test_key(), 0, 1);
  EXPECT_TRUE(z.requires_grad());
  z.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::zeros({4})));
  at::Tensor plain = at::ones({4});
  const auto before = plain._version();
  keyed_normal_(plain, test_key(), 0, 1);
  EXPECT_EQ(plain._version(), before + 1);
}

TEST(RandomOperators, FunctionalSiblingsCarryNoGradient) {
  auto bernoulli =
      c10::Dispatcher::singleton().findSchemaOrThrow("penstock::keyed_bernoulli", "").typed<Call>();
  EXPECT_FALSE(
      bernoulli.call(at::ones({3}).requires_grad_(), test_key().to_ints(), {}, {}, 0.5).requires_grad());
}

TEST(RandomOperators, InferenceMode) {
  at::Tensor expected = at::empty({9});
  keyed_normal_(expected, test_key(), 0, 1);
  c10::InferenceMode inference;
  at::Tensor x = at::empty({9});
  keyed_normal_(x, test_key(), 0, 1);
  EXPECT_TRUE(same_bits(x, expected));
  EXPECT_EQ(keyed_dropout(x, 0.5, test_key()).sizes(), x.sizes());
}

// ---------------------------------------------------------------------------------------------------------------
// errors

template <class Error, class Function>
void expect_error(Function&& function, const std::string& part) {
  try {
    function();
    ADD_FAILURE() << "no error; expected one with: " << part;
  } catch (const Error& error) {
    EXPECT_TRUE(has_text(error.what(), part));
  }
}

TEST(RandomErrors, SayWhatToChange) {
  at::Tensor x = at::empty({4, 6});
  const auto key = test_key();
  expect_error<ValueError>(
      [&] {
        keyed_uniform_(x, key, 0, 1, {{8, 6}, {5, 0}});
      },
      "box in dim 0: got offset 5 and size 4, expected a part of the global size 8");
  expect_error<ValueError>([&] { keyed_uniform_(x, key, 0, 1, {{8, 6}, {-1, 0}}); }, "offset -1");
  expect_error<ValueError>([&] { keyed_uniform_(x, key, 0, 1, {{8, 6}, {}}); }, "2 numbers each");
  expect_error<ValueError>([&] { keyed_uniform_(x, key, 0, 1, {{24}, {0}}); }, "2 numbers each");
  expect_error<ValueError>(
      [&] {
        keyed_uniform_(x, key, 0, 1, {{1LL << 40, 1LL << 40}, {0, 0}});
      },
      "fewer than 2^63 elements");
  expect_error<ValueError>([&] { keyed_uniform_(x, key, 1, 0); }, "[1, 0)");
  expect_error<ValueError>([&] { keyed_uniform_(x, key, -3e38, 3e38); }, "Precision::Double");
  expect_error<ValueError>([&] { keyed_normal_(x, key, 0, -1); }, "standard deviation");
  expect_error<ValueError>([&] { keyed_normal_(x, key, std::nan(""), 1); }, "mean");
  expect_error<ValueError>([&] { keyed_trunc_normal_(x, key, 0, 1, 2, 2); }, "lower bound first");
  expect_error<ValueError>([&] { keyed_trunc_normal_(x, key, 0, 1, 5, 6); }, "2^16 of the 2^32 quantiles");
  expect_error<ValueError>([&] { keyed_trunc_normal_(x, key, 0, 1, -60, -50); },
                           "2^16 of the 2^32 quantiles");
  expect_error<ValueError>([&] { keyed_trunc_normal_(x, key, 0, 1, 50, 60); }, "2^16 of the 2^32 quantiles");
  expect_error<ValueError>([&] { keyed_trunc_normal_(x, key, 0, 0, -1, 1); }, "above 0");
  expect_error<ValueError>([&] { keyed_bernoulli_(x, key, 1.5); }, "from 0 to 1");
  expect_error<ValueError>([&] { keyed_dropout(x, std::nan(""), key); }, "from 0 to 1");
  expect_error<TypeError>([&] { keyed_uniform_(at::empty({3}, at::kLong), key, 0, 1); },
                          "float32, float64, bfloat16 or float16");
  expect_error<TypeError>([&] { keyed_normal_(x, key, 0, 1, {}, Precision::Double); }, "double precision");
  expect_error<TypeError>([&] { keyed_dropout(at::ones({3}, at::kBool), 0.5, key); }, "dtype");
  EXPECT_THROW(keyed_uniform_(at::empty({1}).expand({5}), key, 0, 1),
               c10::Error);  // one memory location for five values
  auto dropout = c10::Dispatcher::singleton().findSchemaOrThrow("penstock::keyed_dropout", "").typed<Call>();
  expect_error<ValueError>(
      [&] {
        dropout.call(x, {1, 2}, {}, {}, 0.5);
      },
      "five integers: seed, step, microbatch, layer, purpose");
}

}  // namespace keyed_random_test
}  // namespace penstock
