// Reading and writing by index, against one process.
#include <gtest/gtest.h>

#include "penstock/errors.h"
#include "tests/dtensor/operator_call.h"
#include "tests/dtensor/rule_checker.h"

namespace penstock::test {
namespace rules_index_test {

using namespace std::chrono_literals;
using at::indexing::None;
using at::indexing::Slice;
using at::indexing::TensorIndex;

TEST(IndexRules, Gather) {
  check_rules({
      {.name = "gather",
       .inputs = {sample({5, 4}), sample_index({5, 3}, 4)},
       .body = [](const Tensors& in) { return Tensors{in[0].gather(1, in[1])}; },
       .most = 16},
      {.name = "gather of rows",
       .inputs = {sample({3, 4}), sample_index({5, 2}, 3)},
       .body = [](const Tensors& in) { return Tensors{in[0].gather(0, in[1])}; },
       .most = 16},
      {.name = "take_along_dim",
       .inputs = {sample({5, 4}), sample_index({5, 1}, 4)},
       .body = [](const Tensors& in) { return Tensors{at::take_along_dim(in[0], in[1], 1)}; },
       .most = 20},
      {.name = "take",
       .inputs = {sample({3, 4}), sample_index({5}, 12)},
       .body = [](const Tensors& in) { return Tensors{in[0].take(in[1])}; },
       .backward = false,
       .most = 20},
      {.name = "gather of integers",
       .inputs = {sample_index({5, 4}, 99), sample_index({5, 2}, 4)},
       .body = [](const Tensors& in) { return Tensors{in[0].gather(1, in[1])}; },
       .most = 20},
  });
}

TEST(IndexRules, Scatter) {
  const auto distinct =
      at::tensor(std::vector<std::int64_t>{0, 3, 2, 1, 4, 0}).view({3, 2});  // distinct within a row
  check_rules({
      {.name = "scatter_add",
       .inputs = {sample({5, 3}), sample_index({4, 3}, 5), sample({4, 3}, 1)},
       .body = [](const Tensors& in) { return Tensors{in[0].scatter_add(0, in[1], in[2])}; },
       .most = 20},
      {.name = "scatter",
       .inputs = {sample({3, 5}), distinct, sample({3, 2}, 1)},
       .body = [](const Tensors& in) { return Tensors{in[0].scatter(1, in[1], in[2])}; },
       .most = 20},
      {.name = "scatter of a number",
       .inputs = {sample({3, 5}), sample_index({3, 2}, 5)},
       .body = [](const Tensors& in) { return Tensors{in[0].scatter(1, in[1], 7)}; },
       .most = 16},
      {.name = "scatter_reduce",
       .inputs = {sample({3, 5}), sample_index({3, 4}, 5), sample({3, 4}, 1)},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].scatter_reduce(1, in[1], in[2], "sum"),
                            in[0].scatter_reduce(1, in[1], in[2], "amax", false),
                            in[0].scatter_reduce(1, in[1], in[2], "mean")};
           },
       .backward = false,
       .most = 14},
      {.name = "scatter_reduce of a number",
       .inputs = {sample({3, 5}), sample_index({3, 4}, 5)},
       .body = [](const Tensors& in) { return Tensors{in[0].scatter(1, in[1], 2, "multiply")}; },
       .backward = false,
       .most = 12},
      {.name = "in place",
       .inputs = {sample({3, 5}), sample_index({3, 4}, 5), sample({3, 4}, 1)},
       .body =
           [](const Tensors& in) {
             Tensors out{in[0].clone(), in[0].clone()};
             out[0].scatter_add_(1, in[1], in[2]);
             out[1].scatter_(1, in[1], 0.5);
             return out;
           },
       .may_refuse = true,
       .most = 20},
  });
}

TEST(IndexRules, Slices) {
  const auto distinct = at::tensor(std::vector<std::int64_t>{4, 0, 2});
  check_rules({
      {.name = "index_select",
       .inputs = {sample({5, 3}), sample_index({4}, 5)},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].index_select(0, in[1]), in[0].t().index_select(1, in[1])};
           },
       .most = 16},
      {.name = "index_add",
       .inputs = {sample({5, 3}), sample_index({4}, 5), sample({4, 3}, 1)},
       .body = [](const Tensors& in) { return Tensors{in[0].index_add(0, in[1], in[2], 0.5)}; },
       .most = 16},
      {.name = "index_copy",
       .inputs = {sample({5, 2}), distinct, sample({3, 2}, 1)},
       .body = [](const Tensors& in) { return Tensors{in[0].index_copy(0, in[1], in[2])}; },
       .most = 16},
      {.name = "index_fill",
       .inputs = {sample({5, 2}), distinct},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].index_fill(0, in[1], 3), in[0].index_fill(0, in[1] - 5, 3)};
           },
       .most = 20},
      {.name = "in place",
       .inputs = {sample({5, 2}), distinct, sample({3, 2}, 1)},
       .body =
           [](const Tensors& in) {
             Tensors out{in[0].clone(), in[0].clone(), in[0].clone()};
             out[0].index_add_(0, in[1], in[2]);
             out[1].index_copy_(0, in[1], in[2]);
             out[2].index_fill_(0, in[1], 1);
             return out;
           },
       .may_refuse = true,
       .most = 20},
  });
}

TEST(IndexRules, Advanced) {
  const auto get = [](const at::Tensor& x, std::initializer_list<TensorIndex> indices) {
    return x.index(indices);
  };
  check_rules({
      {.name = "one index",
       .inputs = {sample({5, 3}), sample_index({4}, 5)},
       .body =
           [=](const Tensors& in) {
             return Tensors{get(in[0], {in[1]}), get(in[0], {in[1] - 5})};
           },
       .most = 14},
      {.name = "of the second dim",
       .inputs = {sample({3, 5, 2}), sample_index({2, 3}, 5)},
       .body =
           [=](const Tensors& in) {
             return Tensors{get(in[0], {Slice(), in[1]})};
           },
       .most = 14},
      {.name = "two adjacent",
       .inputs = {sample({3, 4, 2}), sample_index({5}, 3), sample_index({5}, 4)},
       .body =
           [=](const Tensors& in) {
             return Tensors{get(in[0], {in[1], in[2]})};
           },
       .most = 16},
      {.name = "two apart",
       .inputs = {sample({3, 2, 4}), sample_index({5, 1}, 3), sample_index({2}, 4)},
       .body =
           [=](const Tensors& in) {
             return Tensors{get(in[0], {in[1], Slice(), in[2]})};
           },
       .most = 16},
      {.name = "with a number and a slice",
       .inputs = {sample({3, 5, 4}), sample_index({4}, 5)},
       .body =
           [=](const Tensors& in) {
             return Tensors{get(in[0], {1, in[1], Slice(1, 3)})};
           },
       .most = 20},
  });
}

TEST(IndexRules, AdvancedWrites) {
  const auto distinct = at::tensor(std::vector<std::int64_t>{4, 0, 2});
  check_rules({
      {.name = "accumulate",
       .inputs = {sample({5, 2}), sample_index({4}, 5), sample({4, 2}, 1)},
       .body = [](const Tensors& in) { return Tensors{in[0].index_put({in[1]}, in[2], true)}; },
       .most = 16},
      {.name = "values of one row",
       .inputs = {sample({5, 2}), distinct, sample({2}, 1)},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].index_put({in[1]}, in[2]), in[0].index_put({in[1]}, in[2], true)};
           },
       .most = 16},
      {.name = "in place",
       .inputs = {sample({5, 2}), distinct, sample({3, 2}, 1)},
       .body =
           [](const Tensors& in) {
             Tensors out{in[0].clone(), in[0].clone()};
             out[0].index_put_({in[1]}, in[2]);
             out[1].index_put_({in[1]}, 3);
             return out;
           },
       .may_refuse = true,
       .most = 20},
      {.name = "a mask",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             Tensors out{in[0].clone(), in[0].clone()};
             out[0].index_put_({in[0] > 0}, 3);
             out[1].index_put_({in[0].sum(1) > 0}, 3);
             return out;
           },
       .may_refuse = true},
      {.name = "two adjacent",
       .inputs = {sample({3, 4, 2}), at::tensor(std::vector<std::int64_t>{0, 2, 1}),
                  at::tensor(std::vector<std::int64_t>{3, 0, 1}), sample({3, 2}, 1)},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].index_put({in[1], in[2]}, in[3])};
           },
       .most = 16},
  });
}

TEST(IndexRules, WriteBack) {
  check_rules({
      {.name = "slice_scatter",
       .inputs = {sample({5, 3}), sample({2, 3}, 1)},
       .body = [](const Tensors& in) { return Tensors{at::slice_scatter(in[0], in[1], 0, 1, 3)}; },
       .most = 20},
      {.name = "select_scatter",
       .inputs = {sample({5, 3}), sample({5}, 1)},
       .body = [](const Tensors& in) { return Tensors{at::select_scatter(in[0], in[1], 1, 2)}; },
       .most = 20},
      {.name = "diagonal_scatter",
       .inputs = {sample({3, 4, 3}), sample({4, 3}, 1)},
       .body = [](const Tensors& in) { return Tensors{at::diagonal_scatter(in[0], in[1], 0, 0, 2)}; },
       .most = 20},
      {.name = "as_strided_scatter",
       .inputs = {sample({4, 3}), sample({2, 2}, 1)},
       .body =
           [](const Tensors& in) {
             return Tensors{at::as_strided_scatter(in[0], in[1], {2, 2}, {3, 1}, 1)};
           },
       .backward = false,
       .most = 12},
      {.name = "trace",
       .inputs = {sample({4, 3})},
       .body = [](const Tensors& in) { return Tensors{in[0].trace()}; },
       .most = 12},
      {.name = "masked_scatter",
       .inputs = {sample({4, 3}), sample({4, 3}, 1)},
       .body = [](const Tensors& in) { return Tensors{in[0].masked_scatter(in[0] > 0, in[1])}; },
       .backward = false,
       .most = 12},
  });
}

TEST(IndexRules, CompositesThatCreatePlainTensors) {
  check_rules({
      {.name = "one_hot",
       .inputs = {sample_index({5, 2}, 4)},
       .body =
           [](const Tensors& in) {
             return Tensors{at::one_hot(in[0], 6), at::one_hot(in[0])};
           },
       .most = 12},
      {.name = "repeat_interleave",
       .inputs = {sample({3, 4})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].repeat_interleave(2, 1), in[0].repeat_interleave(3, 0),
                            in[0].repeat_interleave(2)};
           },
       .most = 12},
  });
  // Plain tensors use the original kernel.
  EXPECT_TRUE(at::equal(at::one_hot(sample_index({3}, 4), 5).argmax(1), sample_index({3}, 4)));
  EXPECT_EQ(sample({3}).repeat_interleave(2).numel(), 6);
}

// Errors name the operator and what to do instead.
TEST(IndexRules, ShapesThatDependOnValues) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {}, world.rank(), 2));
    const at::Tensor x = distribute_tensor(sample({4, 3}), mesh, {Shard{0}});
    const auto refuses = [&](const std::string& name, const std::function<void()>& call) {
      try {
        call();
        ADD_FAILURE() << name << " was not refused";
      } catch (const ValueError& error) {
        const std::string text = error.what();
        EXPECT_NE(text.find(name), std::string::npos) << text;
        EXPECT_NE(text.find("full_tensor()"), std::string::npos) << text;
      }
    };
    refuses("aten::nonzero", [&] { x.nonzero(); });
    refuses("aten::_unique2", [&] { at::_unique2(x); });
    refuses("aten::index.Tensor", [&] { x.index({x > 0}); });
  });
}

// An index out of range is an error on every rank, also where each holds a part of the dim.
TEST(IndexRules, OutOfRange) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {}, world.rank(), 2));
    const at::Tensor x = distribute_tensor(sample({4, 3}), mesh, {Shard{0}});
    const at::Tensor index =
        distribute_tensor(at::tensor(std::vector<std::int64_t>{0, 4}), mesh, {Replicate{}});
    EXPECT_THROW(x.index_select(0, index), ValueError);
    EXPECT_THROW(x.index({index}), ValueError);
  });
}

TEST(IndexRules, ByName) {
  const auto distinct = at::tensor(std::vector<std::int64_t>{7, 0, 2, 14});
  check_rules({
      {.name = "put",
       .inputs = {sample({5, 3}), distinct, sample({4}, 1)},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].put(in[1], in[2]), in[0].put(in[1], in[2], true)};
           },
       .most = 16},
      {.name = "masked_scatter",
       .inputs = {sample({5, 3}), sample({5, 3}, 1), sample({15}, 2)},
       .body = [](const Tensors& in) { return Tensors{in[0].masked_scatter(in[1] > 0, in[2])}; },
       .backward = false,
       .most = 16},
      {.name = "masked_select",
       .inputs = {sample({5, 3}), sample({5, 3}, 1)},
       .body = [](const Tensors& in) { return Tensors{in[0].masked_select(in[1] > 0)}; },
       .backward = false,
       .most = 16},
      {.name = "trace",
       .inputs = {sample({4, 4})},
       .body = [](const Tensors& in) { return Tensors{in[0].trace()}; },
       .most = 14},
      each_of("written back", {sample({4, 5}), sample({5}, 1)},
              {{"select_scatter", {{"dim", 0}, {"index", 2}}}}, 16),
      each_of("slices written back", {sample({4, 5}), sample({4, 2}, 1)},
              {{"slice_scatter", {{"dim", 1}, {"start", 1}, {"end", 3}}}}, 16),
      each_of("diagonals written back", {sample({4, 5}), sample({4}, 1)}, {{"diagonal_scatter"}}, 16),
      each_of("strided", {sample({4, 5}), sample({2, 5}, 1)},
              {{"as_strided_scatter",
                {{"size", std::vector<std::int64_t>{2, 5}}, {"stride", std::vector<std::int64_t>{10, 1}}}}},
              16),
      each_of("gradients of one tensor", {sample({4, 5})},
              {{"unfold_backward",
                {{"input_sizes", std::vector<std::int64_t>{5}}, {"dim", 0}, {"size", 5}, {"step", 1}}},
               {"select_backward",
                {{"input_sizes", std::vector<std::int64_t>{4, 3, 5}}, {"dim", 1}, {"index", 2}}},
               {"slice_backward",
                {{"input_sizes", std::vector<std::int64_t>{4, 9}},
                 {"dim", 1},
                 {"start", 2},
                 {"end", 7},
                 {"step", 1}}}},
              14),
      {.name = "gradient of a masked_scatter",
       .inputs = {sample({5, 3}), sample({5, 3}, 1)},
       .body =
           [](const Tensors& in) {
             if (!has_operator("aten::masked_scatter_backward")) return Tensors{};
             return call_operator("aten::masked_scatter_backward", {in[0], in[1] > 0},
                                  {{"sizes", std::vector<std::int64_t>{15}}});
           },
       .backward = false,
       .most = 12},
      {.name = "without checks",
       .inputs = {sample({5, 3}), sample_index({4}, 5), sample({4, 3}, 1)},
       .body =
           [](const Tensors& in) {
             c10::List<c10::optional<at::Tensor>> indices;
             indices.push_back(c10::optional<at::Tensor>(in[1]));
             Tensors out;
             if (has_operator("aten::_unsafe_index.Tensor"))
               out.push_back(call_operator("aten::_unsafe_index.Tensor", {in[0]}, {{"indices", indices}})[0]);
             if (has_operator("aten::_unsafe_index_put"))
               out.push_back(call_operator("aten::_unsafe_index_put", {in[0], in[2]},
                                           {{"indices", indices}, {"accumulate", true}})[0]);
             return out;
           },
       .backward = false,
       .most = 16},
      {.name = "_index_put_impl_",
       .inputs = {sample({5, 3}), sample_index({4}, 5), sample({4, 3}, 1)},
       .body =
           [](const Tensors& in) {
             c10::List<c10::optional<at::Tensor>> indices;
             indices.push_back(c10::optional<at::Tensor>(in[1]));
             const at::Tensor out = in[0].clone();
             call_operator("aten::_index_put_impl_", {out, in[2]},
                           {{"indices", indices}, {"accumulate", true}});
             return Tensors{out};
           },
       .backward = false,
       .may_refuse = true,
       .most = 16},
  });
}

// Results whose shape depends on values are refused, each by its name.
TEST(IndexRules, UnknownShapes) {
  const RulesChecked checked;
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {}, world.rank(), 2));
    const at::Tensor x = distribute_tensor(sample_index({6}, 3), mesh, {Shard{0}});
    for (const OperatorRow& row : std::vector<OperatorRow>{{"nonzero"},
                                                           {"_unique"},
                                                           {"_unique2"},
                                                           {"unique_dim", {{"dim", 0}}},
                                                           {"unique_consecutive"},
                                                           {"unique_dim_consecutive", {{"dim", 0}}},
                                                           {"bincount"},
                                                           {"repeat_interleave.Tensor"}}) {
      if (!has_operator("aten::" + row.name)) continue;
      try {
        call_operator("aten::" + row.name, {x}, row.named);
        ADD_FAILURE() << row.name << " was not refused";
      } catch (const ValueError& error) {
        EXPECT_NE(std::string(error.what()).find("aten::" + row.name), std::string::npos) << error.what();
      }
    }
  });
}

}  // namespace rules_index_test
}  // namespace penstock::test
