// Extensions of gathers: 8-bit gathers, and extensions that are invalid.
#include "penstock/shard_options.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/comm/record/recorder.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/shard/pieces/encoded_parameter.h"
#include "penstock/shard/pieces/piece_copy.h"
#include "penstock/shard/state/shard_info.h"
#include "penstock/shard/state/shard_state.h"
#include "penstock/tensor_parallel.h"
#include "penstock/tensor_subclass.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock {
namespace shard_extension_test {

using namespace std::chrono_literals;
using test::has_text;
using test::message_of;

comm::MeshGroups line(comm::World& world) {
  return {world, init_device_mesh("cpu", {world.size()}, {"dp"}, world.rank(), world.size())};
}

TEST(Int8Gather, IsOffByHalfAStepOfItsBlock) {
  torch::manual_seed(1);
  for (const std::int64_t numel : {0, 1, 127, 128, 300}) {
    const auto int8 = int8_gather(128);
    const at::Tensor shard = at::randn({numel}) * 3, back = at::empty({numel}, at::kBFloat16),
                     exact = at::empty({numel});
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

// Also for uneven shards, on dims 0 and 1: all ranks compute with the same values, and the shards stay exact.
TEST(Int8Gather, GathersAQuarterOfTheBytes) {
  for (const std::int64_t dim : {0, 1})
    comm::run_ranks(3, 60s, [&](comm::World& world) {
      torch::nn::Linear layer(torch::nn::LinearOptions(50, 64).bias(true));
      const at::Tensor value = at::randn({64, 50}, at::detail::createCPUGenerator(2));
      const auto int8 = int8_gather(64);
      const auto state =
          fully_shard(*layer, line(world),
                      {.shard_placement = [&](const std::string&,
                                              const at::Tensor& p) { return Shard{p.dim() > 1 ? dim : 0}; },
                       .extension = [&](const std::string& name,
                                        const at::Tensor&) { return name == "weight" ? int8 : nullptr; }});
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

// ---- gathered parameters that stay encoded ----

struct TwoLayers : torch::nn::Module {
  TwoLayers() {
    first = register_module("first", torch::nn::Linear(50, 64));
    second = register_module("second", torch::nn::Linear(64, 10));
    const at::NoGradGuard no_grad;
    std::uint64_t seed = 5;
    for (at::Tensor& p : parameters())
      p.copy_(at::randn(p.sizes(), at::detail::createCPUGenerator(seed++)) * 0.2);
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

struct Trained {
  std::vector<at::Tensor> losses, parameters;
  std::int64_t gathered = 0;
};

Trained train_extended(comm::World& world, std::int64_t dim,
                       const std::shared_ptr<const AllGatherExtension>& extension, const ShardOptions& more) {
  TwoLayers model;
  ShardOptions options = more;
  options.shard_placement = [dim](const std::string&, const at::Tensor& p) {
    return Shard{p.dim() > 1 ? dim : 0};
  };
  options.extension = [&](const std::string&, const at::Tensor& p) {
    return p.dim() == 2 ? extension : nullptr;
  };
  fully_shard(*model.first, line(world), options);
  fully_shard(*model.second, line(world), options);
  fully_shard(model, line(world), options);
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  Trained trained;
  for (int step = 0; step < 3; ++step) {
    const at::Tensor x = at::randn(
        {7, 50}, at::detail::createCPUGenerator(static_cast<std::uint64_t>(20 + 3 * step + world.rank())));
    optimizer.zero_grad();
    const at::Tensor loss = model.forward(x).pow(2).mean();
    loss.backward();
    optimizer.step();
    trained.losses.push_back(loss.detach().clone());
  }
  shard_state_of(*model.first)->unshard();
  trained.gathered = first_group(*shard_state_of(*model.first))->memory().gathered;
  EXPECT_EQ(is_encoded_parameter(model.first->weight), extension && extension->keeps_encoded());
  shard_state_of(*model.first)->reshard();
  EXPECT_EQ(first_group(*shard_state_of(*model.first))->memory().gathered, 0);
  for (const at::Tensor& p : model.parameters()) trained.parameters.push_back(full_tensor(p.detach()));
  return trained;
}

// Training is bitwise the same, in a quarter of the gathered memory: also if shards are uneven, are freed
// after forward or kept as a slice, or are computed with in another dtype.
TEST(KeptEncoded, TrainsAsDecodedInAQuarterOfTheMemory) {
  const std::vector<ShardOptions> cases{
      {},
      {.reshard_after_forward = false},
      {.mixed_precision = {.param_dtype = at::kDouble, .reduce_dtype = at::kFloat}},
      {.reshard_after_forward = ReshardTo{2}}};
  for (std::size_t i = 0; i < cases.size(); ++i)
    for (const std::int64_t dim : {0, 1})
      comm::run_ranks(i == 3 ? 4 : 3, 60s, [&](comm::World& world) {
        SCOPED_TRACE(i);
        const Trained decoded = train_extended(world, dim, int8_gather(32), cases[i]),
                      kept = train_extended(world, dim, int8_gather({.block = 32, .keep_encoded = true}),
                                            cases[i]);
        for (std::size_t k = 0; k < 3; ++k)
          EXPECT_TRUE(at::equal(kept.losses[k], decoded.losses[k])) << "step " << k;
        for (std::size_t k = 0; k < kept.parameters.size(); ++k)
          EXPECT_TRUE(at::equal(kept.parameters[k], decoded.parameters[k])) << "parameter " << k;
        EXPECT_LT(static_cast<double>(kept.gathered) * 3.0, static_cast<double>(decoded.gathered));
      });
}

TEST(KeptEncoded, ViewsStayEncodedAndWritesAreRefused) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    torch::nn::Linear layer(6, 5);
    const auto state =
        fully_shard(*layer, line(world), {.extension = [](const std::string&, const at::Tensor& p) {
          return p.dim() == 2 ? int8_gather({.block = 8, .keep_encoded = true}) : nullptr;
        }});
    state->unshard();
    const at::NoGradGuard no_grad;
    const at::Tensor weight = layer->weight, whole = weight.clone();
    EXPECT_FALSE(is_encoded_parameter(whole));
    EXPECT_TRUE(is_encoded_parameter(weight.t()));
    EXPECT_TRUE(at::equal(weight.t().slice(0, 1, 5).clone(), whole.t().slice(0, 1, 5)));
    const std::vector<at::Tensor> rows = weight.unbind(0);
    EXPECT_TRUE(is_encoded_parameter(rows[3]));
    EXPECT_TRUE(at::equal(rows[3] * 2, whole[3] * 2));
    EXPECT_TRUE(at::equal(weight.view({-1}).detach() + 0, whole.view({-1})));
    EXPECT_TRUE(at::equal(at::empty({5, 6}).copy_(weight), whole)) << "into plain tensors it may be copied";
    // Freed memory is gathered again when a view is next used.
    const at::Tensor view = weight.t();
    state->reshard();
    EXPECT_TRUE(at::equal(at::mm(at::ones({1, 6}), view), at::mm(at::ones({1, 6}), whole.t())));
    EXPECT_EQ(to_text(first_group(*state)->state()), "Unsharded");
    {
      const UnshardedScope scope(*layer);
      EXPECT_TRUE(has_text(message_of<TypeError>([&] { layer->weight.mul_(2); }), "load_whole"));
      layer->bias.zero_();
    }
    EXPECT_TRUE(at::equal(full_tensor(layer->bias.detach()), at::zeros({5})));
    state->unshard();
    EXPECT_TRUE(at::equal(layer->weight.clone(), whole)) << "a scope has not changed it";
  });
}

// A user-defined subclass: 16-bit values that only the operators of a linear layer understand.
class Halves final : public Payload {
 public:
  static constexpr std::string_view kKind = "Halves";
  explicit Halves(at::Tensor data) : data(std::move(data)) {}
  static at::Tensor make(const at::Tensor& data, const at::Tensor* viewed = nullptr) {
    WrapperGeometry geometry = geometry_of(data);
    geometry.dtype = at::kFloat;
    return make_wrapper(c10::make_intrusive<Halves>(data), geometry, viewed);
  }
  std::string_view kind() const override { return kKind; }
  std::vector<std::pair<std::string, at::Tensor>> inner_tensors() const override { return {{"data", data}}; }
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
    WrapperCall<Halves> call(op, stack);
    if (call.traits().pure_view)
      call.finish(
          call.run([](const Halves& halves) { return halves.data; }),
          [](const at::Tensor& inner, ResultPlace, const at::Tensor* viewed) { return make(inner, viewed); });
    else if (call.traits().name == "aten::mm" || call.traits().name == "aten::addmm")
      call.finish(call.run([](const Halves& halves) { return halves.data.to(at::kFloat); }),
                  [](const at::Tensor& plain, ResultPlace, const at::Tensor*) { return plain; });
    else
      refuse(op);
  }
  const at::Tensor data;
};

struct HalfGather : AllGatherExtension {
  std::int64_t encoded_bytes(std::int64_t numel, at::ScalarType) const override { return numel * 2; }
  void encode(const at::Tensor& shard, const at::Tensor& bytes) const override {
    typed_part(bytes, 0, at::kBFloat16, {shard.numel()}).copy_(shard);
  }
  void decode(const at::Tensor& bytes, const at::Tensor& piece) const override {
    piece.copy_(typed_part(bytes, 0, at::kBFloat16, {piece.numel()}));
  }
  bool keeps_encoded() const override { return true; }
  // Rows are adjacent if a row is a multiple of 8 bytes.
  at::Tensor make_gathered(const GatheredBytes& gathered) const override {
    return Halves::make(typed_part(gathered.rows.view({-1}), 0, at::kBFloat16, gathered.shape));
  }
};

TEST(KeptEncoded, AsAUserDefinedSubclass) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    torch::nn::Linear layer(4, 6), plain(4, 6);
    {
      const at::NoGradGuard no_grad;
      for (const auto& each : {layer, plain}) {
        each->weight.copy_(at::randn({6, 4}, at::detail::createCPUGenerator(8)).to(at::kBFloat16));
        each->bias.fill_(0.5);
      }
    }
    struct Outer : torch::nn::Module {};
    Outer outer;
    outer.register_module("layer", layer.ptr());
    const auto state =
        fully_shard(*layer, line(world), {.extension = [](const std::string&, const at::Tensor& p) {
          return p.dim() == 2 ? std::make_shared<HalfGather>() : nullptr;
        }});
    fully_shard(outer, line(world));
    for (int step = 0; step < 2; ++step) {
      for (const auto& each : {layer, plain})
        for (const at::Tensor& p : each->parameters()) p.mutable_grad().reset();
      at::Tensor x = at::ones({3, 4}) * (1 + world.rank()), same = x.clone();
      x.set_requires_grad(true);
      same.set_requires_grad(true);
      const at::Tensor out = layer(x);
      EXPECT_NE(payload_as<Halves>(layer->weight), nullptr);
      EXPECT_TRUE(at::equal(out, plain(same)));
      state->reshard();
      out.pow(2).sum().backward();
      plain(same).pow(2).sum().backward();
      EXPECT_TRUE(at::equal(x.grad(), same.grad())) << "what was saved is gathered again";
      at::Tensor mean = plain->weight.grad().clone();
      world.group().all_reduce(mean, comm::ReduceOp::Avg).wait();
      EXPECT_TRUE(at::allclose(full_tensor(layer->weight.grad()), mean));
    }
    // Invalid extensions are rejected by name.
    struct Plain : HalfGather {
      at::Tensor make_gathered(const GatheredBytes& gathered) const override {
        return at::empty(gathered.shape);
      }
    };
    struct Elsewhere : HalfGather {
      at::Tensor make_gathered(const GatheredBytes& gathered) const override {
        return Halves::make(at::empty(gathered.shape, at::kBFloat16));
      }
    };
    torch::nn::Linear other(4, 6);
    const auto with = [](auto extension) {
      return ShardOptions{.extension = [extension](const std::string&, const at::Tensor& p) {
        return p.dim() == 2 ? extension : nullptr;
      }};
    };
    EXPECT_TRUE(has_text(
        message_of<ValueError>([&] { fully_shard(*other, line(world), with(std::make_shared<Plain>())); }),
        "'weight': make_gathered"));
    EXPECT_TRUE(has_text(message_of<ValueError>(
                             [&] { fully_shard(*other, line(world), with(std::make_shared<Elsewhere>())); }),
                         "tensors with their own memory"));
    torch::nn::Linear distributed(4, 6);
    distribute_parameter(distributed->weight, line(world), {Shard{0}});
    const comm::MeshGroups one(world, init_device_mesh("cpu", {2, 1}, {"a", "b"}, world.rank(), 2));
    EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                           fully_shard(*distributed, one.with_mesh(one.mesh()["b"]),
                                       with(std::make_shared<HalfGather>()));
                         }),
                         "keeps the gathered parameter encoded"));
  });
}

struct Broken final : AllGatherExtension {
  std::int64_t encoded_bytes(std::int64_t, at::ScalarType) const override { return -1; }
  void encode(const at::Tensor&, const at::Tensor&) const override {}
  void decode(const at::Tensor&, const at::Tensor&) const override {}
};

// Sizes that differ between ranks are detected before anything is sent.
struct Uneven final : AllGatherExtension {
  explicit Uneven(int rank) : rank(rank) {}
  std::int64_t encoded_bytes(std::int64_t numel, at::ScalarType) const override {
    return numel * 4 + rank * 8;
  }
  void encode(const at::Tensor&, const at::Tensor& bytes) const override { bytes.zero_(); }
  void decode(const at::Tensor&, const at::Tensor& piece) const override { piece.zero_(); }
  int rank;
};

TEST(Extensions, ErrorsReachAllRanks) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    torch::nn::Linear layer(4, 4), other(4, 4);
    EXPECT_TRUE(has_text(message_of<ValueError>([&] {
                           fully_shard(*layer, line(world),
                                       {.extension = [](const std::string&, const at::Tensor&) {
                                         return std::make_shared<Broken>();
                                       }});
                         }),
                         "encoded_bytes"));
    fully_shard(*other, line(world), {.extension = [&](const std::string&, const at::Tensor&) {
      return std::make_shared<Uneven>(world.rank());
    }});
    EXPECT_THROW(other(at::ones({1, 4})), ValueError);
  });
}

}  // namespace shard_extension_test
}  // namespace penstock
