// CUDA tensors: NCCL with one rank, and host memory if ranks share a GPU. Needs a GPU; fails without one.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/base/warnings.h"
#include "penstock/comm/backend/backend.h"
#include "penstock/comm/group/operators.h"
#include "penstock/comm/group/self_test.h"
#include "penstock/errors.h"
#include "penstock/world.h"
#include "tests/has_text.h"

namespace penstock::comm {
namespace gpu_test {

using namespace std::chrono_literals;
using test::has_text;

TEST(Gpu, NcclWithOneRank) {
  ASSERT_TRUE(torch::cuda::is_available());
  World world = World::from_env();
  EXPECT_TRUE(has_text(world.group().describe_backends(), "CUDA nccl"));
  for (const auto& result : self_test(world.group(), at::Device(at::kCUDA, 0)))
    EXPECT_TRUE(result.ok) << result.operation << ": " << result.error;
}

TEST(Gpu, NcclContractIsChecked) {
  World world = World::from_env();
  const at::Tensor out = at::ones({4}, at::kCUDA), in = at::zeros({5}, at::kCUDA);
  EXPECT_THROW(world.group().batch_isend_irecv({P2POp::send(out, 0), P2POp::recv(in, 0)}), MismatchError);
}

TEST(Gpu, OperatorsOnCudaTensors) {
  World world = World::from_env();
  at::Tensor x = at::arange(6.0, at::kCUDA).view({3, 2}).requires_grad_();
  functional::wait_tensor(functional::all_gather(x, world.group())).pow(2).sum().backward();
  EXPECT_TRUE(at::allclose(x.grad(), 2 * x.detach()));
}

TEST(Gpu, RanksThatShareAGpuGoThroughHostMemoryWithOneWarning) {
  if (!gloo_available()) return;  // reported at configuration
  WarningCapture capture;
  run_ranks(2, 120s, [](World& world) {
    for (const auto& result : self_test(world.group(), at::Device(at::kCUDA, 0)))
      EXPECT_TRUE(result.ok) << result.operation << ": " << result.error;
  });
  int warnings = 0;
  for (const auto& warning : capture.warnings())
    warnings += warning.message.find("host memory") != std::string::npos ? 1 : 0;
  EXPECT_EQ(warnings, 1);
}

}  // namespace gpu_test
}  // namespace penstock::comm
