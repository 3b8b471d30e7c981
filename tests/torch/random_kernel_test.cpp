// The text of the CUDA kernels, run thread by thread on the host, and the CPU's vector loops, each compared
// with the plain scalar definition. Compiled with -ffp-contract=off.
#include "penstock/torch/random/random_kernel.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/torch/random/random_arguments.h"
#include "tests/torch/random_cases.h"

namespace penstock::random {
namespace random_kernel_test {

using test::make_tensor;
using test::same_bits;

struct Case {
  const char* name;
  Kind kind;
  std::vector<at::ScalarType> dtypes;
  bool in_double;
  AnyConstants constants;
};

std::vector<Case> all_cases() {
  const auto& floats = test::floating_dtypes();
  const std::vector<at::ScalarType> below_double = {at::kFloat, at::kBFloat16, at::kHalf};
  return {
      {"uniform", Kind::Uniform, floats, false, uniform_constants(-0.3, 1.7, false)},
      {"normal", Kind::Normal, floats, false, normal_constants(0.1, 0.7, false)},
      {"trunc normal", Kind::TruncNormal, floats, false, trunc_normal_constants(0.1, 0.7, -1.3, 0.9, false)},
      {"bernoulli",
       Kind::Bernoulli,
       {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kBool},
       false,
       bernoulli_constants(0.37)},
      {"dropout", Kind::Dropout, below_double, false, dropout_constants(0.37, false)},
      {"dropout of float64", Kind::Dropout, {at::kDouble}, false, dropout_constants(0.37, true)},
      {"uniform in double", Kind::Uniform, {at::kDouble}, true, uniform_constants(-0.3, 1.7, true)},
      {"normal in double", Kind::Normal, {at::kDouble}, true, normal_constants(0.1, 0.7, true)},
      {"trunc normal in double",
       Kind::TruncNormal,
       {at::kDouble},
       true,
       trunc_normal_constants(0.1, 0.7, -1.3, 0.9, true)},
  };
}

// Element by element, straight from the definition: no walk, no blocks, no vectors.
at::Tensor by_definition(const Case& one, const test::BoxCase& box, const at::Tensor& in,
                         const philox::Stream& stream) {
  at::Tensor out = at::zeros(box.sizes, in.options());
  const at::Tensor from = in.contiguous();
  RandomJob job;
  job.kind = one.kind;
  job.element = in.scalar_type() == at::kFloat      ? Element::Float32
                : in.scalar_type() == at::kDouble   ? Element::Float64
                : in.scalar_type() == at::kBFloat16 ? Element::BFloat16
                : in.scalar_type() == at::kHalf     ? Element::Float16
                                                    : Element::Bool;
  job.constants = one.constants;
  with_types(job, [&]<Kind kind, class Real, class Word, class Element>() {
    const auto& constants = std::get<Constants<Real, Word>>(one.constants);
    for (i64 i = 0; i < out.numel(); ++i) {
      i64 rest = i, global = 0, stride = 1;
      for (std::size_t d = box.sizes.size(); d-- > 0;) {
        global += (box.offset[d] + rest % box.sizes[d]) * stride;
        rest /= box.sizes[d];
        stride *= box.global[d];
      }
      const philox::Block block = philox::numbers(stream, static_cast<u64>(global) / kPerBlock<Word>);
      write_element<kind>(word_of<Word>(block, static_cast<int>(global % kPerBlock<Word>)), constants,
                          static_cast<Element*>(out.data_ptr())[i],
                          static_cast<const Element*>(from.data_ptr()) + i);
    }
  });
  return out;
}

// Runs `job` as `threads` threads of a device would.
void run_as_device(const RandomJob& job, i64 threads) {
  bool ran = false;
  with_types(job, [&]<Kind kind, class Real, class Word, class Element>() {
    ran = true;
    for (i64 thread = 0; thread < threads; ++thread)
      walk_blocks<kind>(job.walk, job.stream, std::get<Constants<Real, Word>>(job.constants),
                        static_cast<Element*>(job.out), static_cast<const Element*>(job.in), thread, threads);
  });
  ASSERT_TRUE(ran);
}

TEST(RandomKernel, DeviceThreadsAndVectorsComputeTheDefinition) {
  const auto key = test::test_key().to_ints();
  const philox::Stream stream = philox::derive(42, 7, 3, 12, static_cast<u64>(key[4]));
  int runs = 0;
  for (const auto& one : all_cases())
    for (const auto dtype : one.dtypes)
      for (const auto& box : test::box_cases()) {
        at::Tensor given = at::ones(box.sizes, dtype);
        if (one.kind == Kind::Dropout) keyed_normal_(given, {.seed = 5}, 0, 1);
        const at::Tensor expected = by_definition(one, box, given, stream);
        for (const auto memory : test::kMemories) {
          const DrawArguments draw_arguments{"test", key, box.global, box.offset};
          const at::Tensor in =
              one.kind == Kind::Dropout ? make_tensor(box.sizes, dtype, memory).copy_(given) : at::Tensor();
          // Output in another memory format than the input.
          const auto out_memory = static_cast<test::Memory>(
              (static_cast<int>(memory) + (one.kind == Kind::Dropout && runs % 2 == 0 ? 1 : 0)) % 4);
          const auto run = [&](const char* how, const std::function<void(const RandomJob&)>& go) {
            at::Tensor out = make_tensor(box.sizes, dtype, out_memory).fill_(dtype == at::kBool ? 1 : 99);
            go(make_job(draw_arguments, one.kind, one.constants, out, in));
            EXPECT_TRUE(same_bits(out, expected))
                << one.name << " " << dtype << " global " << at::IntArrayRef(box.global) << " part "
                << at::IntArrayRef(box.sizes) << " memory " << static_cast<int>(memory) << ", " << how;
            ++runs;
          };
          run("device, few threads", [](const RandomJob& job) { run_as_device(job, 3); });
          run("device, many threads", [](const RandomJob& job) { run_as_device(job, 1000); });
          for (const auto path : {CpuPath::Portable, CpuPath::Avx2, CpuPath::Avx512})
            if (supported(path))
              run(path == CpuPath::Portable ? "portable"
                  : path == CpuPath::Avx2   ? "AVX2"
                                            : "AVX-512",
                  [path](const RandomJob& job) { run_on_cpu(job, path); });
          if (::testing::Test::HasFailure()) return;
        }
      }
  EXPECT_GT(runs, 1000);
}

// Rows that start at different positions of a block, and more of them than fit in 32 bits.
TEST(RandomKernel, RowsOfAWalk) {
  BoxWalk walk;
  walk.dims = 3;
  walk.size[0] = 5, walk.size[1] = 1LL << 33, walk.size[2] = 3;
  walk.global_stride[1] = 7, walk.global_stride[2] = 7LL << 33;
  walk.out_stride[1] = 2, walk.out_stride[2] = 11;
  walk.in_stride[1] = 3, walk.in_stride[2] = 13;
  walk.start = 100;
  const RowStart start = row_start(walk, (2LL << 33) + 12345678901LL % (1LL << 33));
  const i64 position = 12345678901LL % (1LL << 33);
  EXPECT_EQ(start.global, 100 + position * 7 + 2 * (7LL << 33));
  EXPECT_EQ(start.out, position * 2 + 22);
  EXPECT_EQ(start.in, position * 3 + 26);
}

TEST(RandomKernel, DimsThatContinueEachOtherAreOne) {
  const auto key = test::test_key().to_ints();
  const auto walk = [&](const at::Tensor& tensor, const test::Sizes& global, const test::Sizes& offset) {
    return make_job({"test", key, global, offset}, Kind::Uniform, uniform_constants(0, 1, false), tensor)
        .walk;
  };
  const BoxWalk whole = walk(at::empty({4, 6, 8}), {}, {});
  EXPECT_EQ(whole.dims, 1);
  EXPECT_EQ(whole.size[0], 192);
  EXPECT_EQ(whole.blocks_per_row, 48);
  const BoxWalk rows = walk(at::empty({2, 6, 8}), {4, 6, 8}, {1, 0, 0});
  EXPECT_EQ(rows.dims, 1);
  EXPECT_EQ(rows.start, 48);
  const BoxWalk columns = walk(at::empty({4, 6, 2}), {4, 6, 8}, {0, 0, 3});
  EXPECT_EQ(columns.dims, 2);
  EXPECT_EQ(columns.size[0], 2);
  EXPECT_EQ(columns.rows, 24);
  EXPECT_EQ(columns.blocks_per_row, 2);  // from the fourth element of a block into the next, in every row
  const BoxWalk uneven = walk(at::empty({4, 2}), {4, 7}, {0, 3});
  EXPECT_EQ(uneven.blocks_per_row, 2);
  const BoxWalk single = walk(at::empty({4, 1}), {4, 7}, {0, 3});
  EXPECT_EQ(single.size[0], 1);
  EXPECT_EQ(single.rows, 4);
  EXPECT_EQ(walk(at::empty({0, 3}), {4, 7}, {0, 3}).rows, 0);
}

}  // namespace random_kernel_test
}  // namespace penstock::random
