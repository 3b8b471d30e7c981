// Records of distributed tensors: their contents, sending them, and the tensors created from them.
#include "penstock/dtensor/tensor/dtensor_record.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <future>

#include "penstock/base/warnings.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/pipeline/contract/record_checks.h"
#include "penstock/pipeline/contract/record_messages.h"
#include "penstock/torch/tree/distributed_type.h"
#include "tests/dtensor/rule_checker.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::test {
namespace dtensor_record_test {

using namespace std::chrono_literals;
using Numbers = std::vector<std::int64_t>;

comm::MeshGroups mesh_on(comm::World& world, const Numbers& shape, const std::vector<std::string>& names) {
  return {world, init_device_mesh("cpu", shape, names, world.rank(), world.size())};
}

std::vector<Placements> some_placements() {
  return {{Replicate{}, Replicate{}},
          {Shard{0}, Replicate{}},
          {Shard{0}, Shard{1}},
          {Shard{1}, Shard{1}},
          {Shard{0}, Partial{}},
          {StridedShard{0, 2}, Shard{0}},
          {Partial{PartialOp::Max}, Shard{0}}};
}

TEST(DTensorRecord, SaysWhatTheTensorIs) {
  comm::run_ranks(4, 60s, [](comm::World& world) {
    const auto mesh = mesh_on(world, {2, 2}, {"dp", "tp"});
    // 5 rows are split into 3 and 2, 3 columns into 2 and 1.
    const at::Tensor tensor = distribute_tensor(sample({5, 3}).requires_grad_(), mesh, {Shard{0}, Shard{1}});
    const DistributedRecord record = record_of_dtensor(tensor);
    const Numbers local{mesh.coordinate()[0] == 0 ? 3 : 2, mesh.coordinate()[1] == 0 ? 2 : 1};
    EXPECT_EQ(record.local(), TensorRecord::contiguous(local, at::kFloat, true));
    EXPECT_EQ(record.global_shape(), (Numbers{5, 3}));
    EXPECT_EQ(record.global_stride(), (Numbers{3, 1}));
    EXPECT_EQ(record.placements(), (Placements{Shard{0}, Shard{1}}));
    EXPECT_EQ(record.mesh_key(), (MeshKey{{"dp", "tp"}, MeshLayout({2, 2})}));
    EXPECT_FALSE(record_of_dtensor(tensor.detach()).requires_grad());

    // The transposed tensor: both strides change.
    const DistributedRecord transposed = record_of_dtensor(tensor.t());
    EXPECT_EQ(transposed.global_shape(), (Numbers{3, 5}));
    EXPECT_EQ(transposed.global_stride(), (Numbers{1, 3}));
    EXPECT_EQ(transposed.local().shape(), (Numbers{local[1], local[0]}));
    EXPECT_EQ(transposed.local().stride(), (Numbers{1, local[1]}));
    EXPECT_EQ(transposed.placements(), (Placements{Shard{1}, Shard{0}}));
  });
}

TEST(DTensorRecord, AMeshWithoutNamesAndASlice) {
  comm::run_ranks(4, 60s, [](comm::World& world) {
    const auto unnamed = mesh_on(world, {4}, {});
    EXPECT_EQ(record_of_dtensor(distribute_tensor(sample({5}), unnamed, {Shard{0}})).mesh_key(),
              (MeshKey{{}, MeshLayout({4})}));
    const auto root = mesh_on(world, {2, 2}, {"dp", "tp"});
    const auto dp = root.with_mesh(root.mesh()["dp"]);
    EXPECT_EQ(record_of_dtensor(distribute_tensor(sample({5}), dp, {Shard{0}})).mesh_key(),
              (MeshKey{{"dp"}, MeshLayout({2}, {2})}));
  });
}

TEST(DTensorRecord, IsSentAndRecreated) {
  comm::run_ranks(4, 60s, [](comm::World& world) {
    const auto mesh = mesh_on(world, {2, 2}, {"dp", "tp"});
    for (const Placements& placements : some_placements())
      for (const bool requires_grad : {false, true})
        for (const bool transposed : {false, true}) {
          at::Tensor tensor = spread(sample({5, 3}), mesh, placements);
          if (transposed) tensor = tensor.t();
          tensor = tensor.detach().requires_grad_(requires_grad);
          const TensorMeta meta = meta_of(tensor);
          ASSERT_TRUE(is_distributed(meta));
          const auto record =
              std::get<DistributedRecord>(comm::from_message<TensorMeta>(comm::to_message(meta)));
          EXPECT_EQ(TensorMeta(record), meta) << to_string(meta);

          const at::Tensor made = make_dtensor_from_record(record, at::kCPU, mesh);
          EXPECT_EQ(record_of_dtensor(made), record) << to_string(meta);
          EXPECT_EQ(mesh_of(made), mesh);
          EXPECT_TRUE(made.is_leaf());
          EXPECT_EQ(made.requires_grad(), requires_grad);
          // The local part is a buffer to receive into, without a graph.
          const at::Tensor buffer = local_if_distributed(made, kDetach);
          EXPECT_FALSE(buffer.requires_grad());
          buffer.copy_(local_if_distributed(tensor, kDetach));
          EXPECT_TRUE(at::equal(full_tensor(made.detach()), full_tensor(tensor.detach()))) << to_string(meta);
        }
  });
}

TEST(DTensorRecord, AMadeTensorGetsItsGradient) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const auto mesh = mesh_on(world, {2}, {"tp"});
    const DistributedRecord record(
        TensorRecord::contiguous({mesh.coordinate()[0] == 0 ? 2 : 1, 2}, at::kFloat, true), {3, 2}, {2, 1},
        {Shard{0}}, mesh.mesh().key());
    const at::Tensor made = make_dtensor_from_record(record, at::kCPU, mesh);
    (made * 3).sum().backward();
    ASSERT_TRUE(is_dtensor(made.grad()));
    EXPECT_TRUE(at::equal(full_tensor(made.grad()), at::full({3, 2}, 3.0)));
  });
}

// One rank creates the tensor while the other does not take part: nothing waits.
TEST(DTensorRecord, CreatingNeedsNoOtherRank) {
  std::promise<void> made;
  comm::run_ranks(2, 20s, [&](comm::World& world) {
    const auto mesh = mesh_on(world, {2}, {"tp"});
    // If it exited, its connections would break while the other may still be creating its mesh.
    if (world.rank() == 1) {
      EXPECT_EQ(made.get_future().wait_for(20s), std::future_status::ready);
      return;
    }
    const DistributedRecord record(TensorRecord::contiguous({2, 2}, at::kDouble), {3, 2}, {2, 1}, {Shard{0}},
                                   mesh.mesh().key());
    EXPECT_EQ(local_shape_of(make_dtensor_from_record(record, at::kCPU, mesh)), (Numbers{2, 2}));
    made.set_value();
  });
}

TEST(DTensorRecord, ErrorsSayWhatToChange) {
  comm::run_ranks(3, 60s, [](comm::World& world) {
    const auto root = mesh_on(world, {3}, {"tp"});
    const auto record_at = [&](std::int64_t rows) {
      return DistributedRecord(TensorRecord::contiguous({rows, 2}, at::kFloat), {5, 2}, {2, 1}, {Shard{0}},
                               root.mesh().key());
    };
    // 5 rows over 3 ranks are 2, 2, 1: every rank takes a record of the other size.
    const std::int64_t mine = world.rank() == 2 ? 1 : 2;
    EXPECT_NO_THROW(make_dtensor_from_record(record_at(mine), at::kCPU, root));
    const std::string shape = message_of<PipeliningMetadataError>(
        [&] { make_dtensor_from_record(record_at(3 - mine), at::kCPU, root); });
    EXPECT_TRUE(has_text(shape, mine == 1 ? "got [2, 2], expected [1, 2]" : "got [1, 2], expected [2, 2]"));
    EXPECT_TRUE(has_text(shape, "the rank at the same coordinate"));

    const auto other = mesh_on(world, {3}, {"dp"});
    EXPECT_TRUE(has_text(message_of<PipeliningMetadataError>(
                             [&] { make_dtensor_from_record(record_at(mine), at::kCPU, other); }),
                         "record.mesh_key()"));

    const auto two = mesh_on(world, {2}, {"tp"});
    if (world.rank() == 2) {
      const DistributedRecord record(TensorRecord::contiguous({1, 2}, at::kFloat), {2, 2}, {2, 1}, {Shard{0}},
                                     two.mesh().key());
      EXPECT_TRUE(has_text(
          message_of<PipeliningMetadataError>([&] { make_dtensor_from_record(record, at::kCPU, two); }),
          "rank 2, which is not in"));
    }
    EXPECT_TRUE(has_text(message_of<TypeError>([] { record_of_dtensor(at::ones({2})); }),
                         "record_of_dtensor: got a plain tensor"));
  });
}

TEST(DTensorRecord, PenstockTorchKnowsTheType) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const auto mesh = mesh_on(world, {2}, {"tp"});
    const at::Tensor plain = sample({2, 3}).requires_grad_();
    const at::Tensor tensor = distribute_tensor(sample({4, 3}).requires_grad_(), mesh, {Shard{0}});
    EXPECT_TRUE(is_distributed_tensor(tensor));
    EXPECT_FALSE(is_distributed_tensor(plain));
    EXPECT_EQ(distributed_record_of(tensor), record_of_dtensor(tensor));
    EXPECT_TRUE(
        has_text(message_of<PipeliningMetadataError>([&] { record_of(tensor); }), "distributed_record_of"));
    EXPECT_EQ(make_raw_tensor(meta_of(tensor), at::kCPU).sizes(), at::IntArrayRef({2, 3}));

    // The local part, with or without the graph.
    EXPECT_TRUE(local_if_distributed(plain).is_same(plain));
    const at::Tensor local = local_if_distributed(tensor);
    EXPECT_FALSE(is_distributed_tensor(local));
    EXPECT_TRUE(local.requires_grad());
    local.sum().backward();
    EXPECT_TRUE(at::equal(full_tensor(tensor.grad()), at::ones({4, 3})));
    EXPECT_FALSE(local_if_distributed(tensor, kDetach).requires_grad());
    EXPECT_FALSE(local_if_distributed(plain, kDetach).requires_grad());

    // The local part has the shape of the plain tensor, so the kind is the only difference.
    const auto found = check_meta("stage 1 input", meta_of(plain), tensor);
    ASSERT_EQ(found.size(), 1u);
    EXPECT_TRUE(has_text(found[0], "a distributed tensor"));
    EXPECT_THROW(check_meta("stage 1 input", meta_of(plain), tensor, OnMismatch::Raise),
                 PipeliningMetadataError);
    const MetaList expected(TensorMetas{meta_of(tensor), meta_of(plain)});
    EXPECT_TRUE(check_metas("stage 1 inputs", expected, std::vector<at::Tensor>{tensor, plain}).empty());
    const at::Tensor gathered = redistribute(tensor.detach(), {Replicate{}});
    const auto differ = check_metas("stage 1 inputs", expected, std::vector<at::Tensor>{gathered, plain},
                                    OnMismatch::Collect);
    std::string all;
    for (const std::string& line : differ) all += line + "\n";
    EXPECT_TRUE(has_text(all, "placements: got [R], expected [S(0)]"));
  });
}

TEST(DTensorRecord, AMismatchOfKindsWarns) {
  WarningCapture capture;
  comm::run_ranks(1, 60s, [](comm::World& world) {
    const auto mesh = mesh_on(world, {1}, {"tp"});
    const at::Tensor tensor = distribute_tensor(sample({4, 3}), mesh, {Shard{0}});
    EXPECT_EQ(check_meta("stage 1 input", meta_of(tensor), sample({4, 3}), OnMismatch::Warn).size(), 1u);
  });
  ASSERT_EQ(capture.warnings().size(), 1u);
  EXPECT_TRUE(has_text(capture.warnings()[0].message, "dynamically inferred"));
}

TEST(DTensorRecord, WaitsForAPendingRedistribution) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const auto mesh = mesh_on(world, {2}, {"tp"});
    const at::Tensor tensor = distribute_tensor(sample({5, 3}), mesh, {Shard{0}});
    const at::Tensor gathered = redistribute(tensor, {Shard{1}}, {.async = true});
    EXPECT_EQ(record_of_dtensor(gathered).local(),
              TensorRecord::contiguous({5, world.rank() == 0 ? 2 : 1}, at::kFloat));
    EXPECT_TRUE(at::equal(full_tensor(gathered), sample({5, 3})));
  });
}

}  // namespace dtensor_record_test
}  // namespace penstock::test
