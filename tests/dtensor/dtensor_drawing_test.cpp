// The drawing of a distributed tensor is that of its mesh and placements.
#include "penstock/dtensor.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/dtensor/plan/shard_drawing.h"
#include "penstock/errors.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::test {
namespace dtensor_drawing_test {

TEST(DTensorDrawing, IsThatOfItsPlacements) {
  const comm::MeshGroups mesh(comm::World::fake(2, 4), init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, 2, 4));
  const at::Tensor tensor =
      distribute_tensor(at::ones({5, 3}), mesh, {Shard{0}, Replicate{}}, {.source_axis_rank = {}});
  EXPECT_EQ(draw_sharding_text(tensor), draw_sharding_text({5, 3}, mesh.mesh(), {Shard{0}, Replicate{}}));
  EXPECT_EQ(draw_sharding_svg(tensor), draw_sharding_svg({5, 3}, mesh.mesh(), {Shard{0}, Replicate{}}));
  EXPECT_EQ(draw_sharding_text(tensor.t()), draw_sharding_text({3, 5}, mesh.mesh(), {Shard{1}, Replicate{}}));
}

TEST(DTensorDrawing, APlainTensorIsRefused) {
  EXPECT_TRUE(has_text(message_of<TypeError>([] { draw_sharding_text(at::ones({2})); }),
                       "draw_sharding_text: got a plain tensor"));
  EXPECT_TRUE(has_text(message_of<TypeError>([] { draw_sharding_svg(at::Tensor()); }),
                       "draw_sharding_svg: got an undefined tensor"));
}

}  // namespace dtensor_drawing_test
}  // namespace penstock::test
