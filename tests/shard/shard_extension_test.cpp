// What shards become on their way: 8-bit gathers, and extensions that do not fit.
#include "penstock/shard/int8_gather.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/base/errors.h"
#include "penstock/comm/recorder.h"
#include "penstock/dtensor/dtensor.h"
#include "penstock/shard/fully_shard.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock {
namespace shard_extension_test {

using namespace std::chrono_literals;
using test::has_text;
using test::message_of;

comm::MeshGroups line(comm::World& world) { return {world, init_device_mesh("cpu", {world.size()}, {"dp"}, Rank{world.rank()}, world.size())}; }

TEST(Int8Gather, IsOffByHalfAStepOfItsBlock) {
  torch::manual_seed(1);
  for (const std::int64_t numel : {0, 1, 127, 128, 300}) {
    const auto int8 = int8_gather(128);
    const at::Tensor shard = at::randn({numel}) * 3, back = at::empty({numel}, at::kBFloat16), exact = at::empty({numel});
    const at::Tensor bytes = at::empty({int8->encoded_bytes(numel, at::kFloat)}, at::kByte);
    EXPECT_EQ(bytes.numel(), numel + (numel + 127) / 128 * 4);
    int8->encode(shard, bytes);
    int8->decode(bytes, exact);
    int8->decode(bytes, back);
    for (std::int64_t from = 0; from < numel; from += 128) {
      const at::Tensor block = shard.slice(0, from, from + 128);
      const float step = block.abs().max().item<float>() / 127;
      EXPECT_LE((exact.slice(0, from, from + 128) - block).abs().max().item<float>(), step * 0.5001f);
    }
  }
  const at::Tensor zeros = at::zeros({5}), bytes = at::empty({9}, at::kByte), out = at::ones({5});
  int8_gather()->encode(zeros, bytes);
  int8_gather()->decode(bytes, out);
  EXPECT_TRUE(at::equal(out, zeros));
  EXPECT_THROW(int8_gather(0), ValueError);
}

// Also where shards are uneven, on dims 0 and 1: all ranks compute with the same values, and the shards stay exact.
TEST(Int8Gather, GathersAQuarterOfTheBytes) {
  for (const std::int64_t dim : {0, 1})
    comm::run_ranks(3, 60s, [&](comm::World& world) {
      torch::nn::Linear layer(torch::nn::LinearOptions(50, 64).bias(true));
      const at::Tensor value = at::randn({64, 50}, at::detail::createCPUGenerator(2));
      const auto int8 = int8_gather(64);
      const auto state = fully_shard(*layer, line(world), {.shard_placement = [&](const std::string&, const at::Tensor& p) { return Shard{p.dim() > 1 ? dim : 0}; },
                                                           .extension = [&](const std::string& name, const at::Tensor&) { return name == "weight" ? int8 : nullptr; }});
      load_whole(layer->weight, value);
      state->unshard();
      const at::Tensor gathered = layer->weight.detach().clone();
      EXPECT_LE((gathered - value).abs().max().item<float>(), value.abs().max().item<float>() / 127);
      EXPECT_GT((gathered - value).abs().max().item<float>(), 0);
      at::Tensor all = at::empty({3, 64, 50});
      world.group().all_gather(all, gathered).wait();
      for (int i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(all[i], gathered));
      state->reshard();
      EXPECT_TRUE(at::equal(full_tensor(layer->weight.detach()), value));
      const ShardedParameter& p = shard_of(layer->weight)->parameter();
      EXPECT_LT(p.row_bytes * 3.5, static_cast<double>(p.layout().padded_numel()) * 4);
      layer(at::ones({2, 50})).sum().backward();
      EXPECT_TRUE(at::allclose(full_tensor(layer->weight.grad()), at::full({64, 50}, 2.0)));
    });
}

struct Broken final : AllGatherExtension {
  std::int64_t encoded_bytes(std::int64_t, at::ScalarType) const override { return -1; }
  void encode(const at::Tensor&, const at::Tensor&) const override {}
  void decode(const at::Tensor&, const at::Tensor&) const override {}
};

// Sizes that differ from rank to rank are found before anything is sent.
struct Uneven final : AllGatherExtension {
  explicit Uneven(int rank) : rank(rank) {}
  std::int64_t encoded_bytes(std::int64_t numel, at::ScalarType) const override { return numel * 4 + rank * 8; }
  void encode(const at::Tensor&, const at::Tensor& bytes) const override { bytes.zero_(); }
  void decode(const at::Tensor&, const at::Tensor& piece) const override { piece.zero_(); }
  int rank;
};

TEST(Extensions, ErrorsAreThoseOfAllRanks) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    torch::nn::Linear layer(4, 4), other(4, 4);
    EXPECT_TRUE(has_text(message_of<ValueError>([&] { fully_shard(*layer, line(world), {.extension = [](const std::string&, const at::Tensor&) { return std::make_shared<Broken>(); }}); }),
                         "encoded_bytes"));
    fully_shard(*other, line(world), {.extension = [&](const std::string&, const at::Tensor&) { return std::make_shared<Uneven>(world.rank()); }});
    EXPECT_THROW(other(at::ones({1, 4})), ValueError);
  });
}

}  // namespace shard_extension_test
}  // namespace penstock
