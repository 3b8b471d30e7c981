// CUDA compared with the CPU, bit by bit. Needs a GPU; fails without one.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <thread>

#include "penstock/errors.h"
#include "penstock/random.h"
#include "penstock/torch/compat/cuda_kernel.h"
#include "tests/has_text.h"
#include "tests/torch/random_cases.h"

namespace penstock {
namespace random_gpu_test {

using test::box_cases;
using test::fill_cases;
using test::has_text;
using test::make_tensor;
using test::same_bits;
using test::test_key;

TEST(RandomGpu, EveryFunctionDtypeBoxAndMemory) {
  ASSERT_TRUE(torch::cuda::is_available());
  for (const auto& function : fill_cases())
    for (const auto dtype : function.dtypes)
      for (const auto& one : box_cases()) {
        at::Tensor expected = at::empty(one.sizes, dtype);
        function.fill(expected, test_key(), one.box());
        for (const auto memory : test::kMemories) {
          at::Tensor part = make_tensor(one.sizes, at::TensorOptions(at::kCUDA).dtype(dtype), memory);
          function.fill(part, test_key(), one.box());
          ASSERT_TRUE(same_bits(part, expected))
              << function.name << " " << dtype << " global " << at::IntArrayRef(one.global) << " part "
              << part.sizes() << " memory " << static_cast<int>(memory);
        }
      }
}

// Many more words than the boxes above, to reach every branch and many roundings.
TEST(RandomGpu, MillionsOfValues) {
  for (const auto& function : fill_cases())
    for (const auto dtype : function.dtypes) {
      at::Tensor host = at::empty({(1 << 23) + 3}, dtype),
                 device = at::empty({(1 << 23) + 3}, at::TensorOptions(at::kCUDA).dtype(dtype));
      const RandomKey key{.seed = 2024, .step = 11};
      function.fill(host, key, {});
      function.fill(device, key, {});
      EXPECT_TRUE(same_bits(device, host)) << function.name << " " << dtype;
    }
}

TEST(RandomGpu, Dropout) {
  for (const auto dtype : test::floating_dtypes())
    for (const double p : {0.0, 0.3, 1.0})
      for (const auto memory : test::kMemories) {
        at::Tensor x = make_tensor({37, 5, 29}, dtype, memory);
        keyed_normal_(x, {.seed = 1}, 0, 100);
        at::Tensor on_device = make_tensor({37, 5, 29}, at::TensorOptions(at::kCUDA).dtype(dtype), memory);
        on_device.copy_(x);
        const GlobalBox box{{74, 5, 31}, {37, 0, 1}};
        x.requires_grad_();
        on_device.requires_grad_();
        const at::Tensor y = keyed_dropout(x, p, test_key(), box),
                         z = keyed_dropout(on_device, p, test_key(), box);
        EXPECT_TRUE(same_bits(z, y)) << dtype << " " << p;
        EXPECT_EQ(z.strides(), y.strides());
        const at::Tensor gradient = at::arange(37 * 5 * 29, dtype).view({29, 5, 37}).permute({2, 1, 0});
        y.backward(gradient);
        z.backward(gradient.to(at::kCUDA));
        EXPECT_TRUE(same_bits(on_device.grad(), x.grad())) << dtype << " " << p;
        EXPECT_TRUE(same_bits(keyed_keep_mask(on_device, p, test_key(), box),
                              keyed_keep_mask(x, p, test_key(), box)));
      }
}

TEST(RandomGpu, DropoutOfExtremes) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const auto dtype : test::floating_dtypes()) {
    const at::Tensor x =
        at::tensor({0.0, -0.0, infinity, -infinity, 1e-45, 6e-8, 65504.0, 3e38, -1e-40, 5e-324}, at::kDouble)
            .to(dtype)
            .repeat({50});
    EXPECT_TRUE(same_bits(keyed_dropout(x.to(at::kCUDA), 0.3, test_key()), keyed_dropout(x, 0.3, test_key())))
        << dtype;
    const at::Tensor nan = at::full({100}, std::nan(""), dtype);
    EXPECT_TRUE(at::equal(keyed_dropout(nan.to(at::kCUDA), 0.3, test_key()).isnan().cpu(),
                          keyed_dropout(nan, 0.3, test_key()).isnan()))
        << dtype;
  }
}

TEST(RandomGpu, Initializers) {
  at::Tensor host = at::empty({300, 200}), device = at::empty({300, 200}, at::kCUDA);
  keyed_kaiming_uniform_(host, test_key());
  keyed_kaiming_uniform_(device, test_key());
  EXPECT_TRUE(same_bits(device, host));
  keyed_xavier_normal_(host, test_key());
  keyed_xavier_normal_(device, test_key());
  EXPECT_TRUE(same_bits(device, host));
}

TEST(RandomGpu, RunsOnTheCurrentStream) {
  const auto stream = c10::cuda::getStreamFromPool();
  at::Tensor expected = at::empty({1 << 22});
  keyed_normal_(expected, test_key(), 0, 1);
  const c10::cuda::CUDAStreamGuard guard(stream);
  at::Tensor x = at::zeros({1 << 22}, at::kCUDA);
  keyed_normal_(x, test_key(), 0, 1);
  at::Tensor y = x * 2;  // after it on the same stream
  stream.synchronize();
  EXPECT_TRUE(same_bits(y, expected * 2));
}

TEST(RandomGpu, FromManyThreads) {
  at::Tensor expected = at::empty({10000});
  keyed_normal_(expected, test_key(), 0.5, 3);
  std::vector<at::Tensor> results(8);
  std::vector<std::thread> threads;
  for (auto& result : results)
    threads.emplace_back([&result] {
      result = at::empty({10000}, at::kCUDA);
      keyed_normal_(result, test_key(), 0.5, 3);
      torch::cuda::synchronize();
    });
  for (auto& thread : threads) thread.join();
  for (const auto& result : results) EXPECT_TRUE(same_bits(result, expected));
}

TEST(CudaKernelText, CompilesAndLaunches) {
  CudaKernel kernel(
      {.name = "scale",
       .text = "#include \"by.h\"\nextern \"C\" __global__ void scale(float* x, float by, int n) {\n"
               "  const int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i < n) x[i] = times(x[i], by) "
               "+ OFFSET;\n}\n",
       .headers = {{"by.h", "__device__ float times(float a, float b) { return a * b; }\n"}},
       .macros = {{"OFFSET", "0.5f"}}});
  at::Tensor x = at::arange(1000.0, at::TensorOptions(at::kCUDA).dtype(at::kFloat));
  kernel.launch(x.device().index(), 4, 256, x.data_ptr<float>(), 3.0f, 1000);
  EXPECT_TRUE(at::equal(x.cpu(), at::arange(1000.0, at::kFloat) * 3 + 0.5));
}

TEST(CudaKernelText, ErrorsCarryTheCompilersLog) {
  CudaKernel kernel(
      {.name = "broken", .text = "extern \"C\" __global__ void broken(float* x) { *x = no_such_thing; }\n"});
  try {
    kernel.launch(0, 1, 1, static_cast<float*>(nullptr));
    ADD_FAILURE() << "broken text was compiled";
  } catch (const StateError& error) {
    EXPECT_TRUE(has_text(error.what(), "no_such_thing"));
    EXPECT_TRUE(has_text(error.what(), "--fmad=false"));
  }
}

}  // namespace random_gpu_test
}  // namespace penstock
