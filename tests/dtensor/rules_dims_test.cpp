// Operators that move, cut and join dims, against one process: forward, backward and in place.
#include <gtest/gtest.h>

#include "penstock/errors.h"
#include "tests/dtensor/operator_call.h"
#include "tests/dtensor/rule_checker.h"

namespace penstock::test {
namespace rules_dims_test {

using namespace std::chrono_literals;

TEST(DimRules, Moves) {
  check_rules({
      {.name = "t, transpose",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].t(), in[0].transpose(0, -1), in[0].t() * 2};
           },
       .most = 14},
      {.name = "permute",
       .inputs = {sample({3, 2, 4})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].permute({2, 0, 1}), in[0].permute({-1, 1, 0})};
           },
       .most = 20},
      {.name = "unsqueeze",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].unsqueeze(0), in[0].unsqueeze(1), in[0].unsqueeze(-1)};
           },
       .most = 14},
      {.name = "expand",
       .inputs = {sample({5, 1, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].expand({5, 4, 3}), in[0].expand({2, -1, 1, -1})};
           },
       .most = 20},
      {.name = "flip, roll",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].flip({0}), in[0].flip({0, 1}), in[0].roll({2}, {0}), in[0].roll(3)};
           },
       .most = 14},
      {.name = "tril, triu",
       .inputs = {sample({3, 4, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].tril(), in[0].triu(1)};
           },
       .most = 20},
      {.name = "repeat",
       .inputs = {sample({3, 2})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].repeat({1, 3}), in[0].repeat({2, 1}), in[0].repeat({2, 1, 1})};
           },
       .most = 14},
  });
}

TEST(DimRules, Cuts) {
  check_rules({
      {.name = "select",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].select(0, 2), in[0].select(1, -1)};
           },
       .most = 14},
      {.name = "slice",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].slice(0, 1, 4), in[0].slice(1, 0, 9, 2), in[0].slice(0, -2),
                            in[0].slice(0)};
           },
       .most = 14},
      {.name = "split, chunk",
       .inputs = {sample({5, 4})},
       .body =
           [](const Tensors& in) {
             Tensors out = in[0].split(2, 0);
             for (const auto& t : in[0].chunk(2, 1)) out.push_back(t);
             for (const auto& t : in[0].split_with_sizes({1, 3}, 1)) out.push_back(t);
             return out;
           },
       .most = 12},
      {.name = "unbind",
       .inputs = {sample({3, 2})},
       .body =
           [](const Tensors& in) {
             Tensors out = in[0].unbind(0);
             for (const auto& t : in[0].unbind(-1)) out.push_back(t);
             return out;
           },
       .most = 12},
      {.name = "diagonal",
       .inputs = {sample({3, 4, 2})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].diagonal(), in[0].diagonal(1, 0, 2)};
           },
       .most = 20},
      {.name = "unfold",
       .inputs = {sample({6, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].unfold(0, 3, 2), in[0].unfold(1, 2, 1)};
           },
       .most = 14},
      {.name = "pad",
       .inputs = {sample({4, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{at::constant_pad_nd(in[0], {1, 2}), at::constant_pad_nd(in[0], {0, 0, 1, 0}, 3),
                            at::constant_pad_nd(in[0], {-1, 0})};
           },
       .most = 14},
      {.name = "glu",
       .inputs = {sample({5, 4})},
       .body =
           [](const Tensors& in) {
             return Tensors{at::glu(in[0], 1), at::glu(in[0].t(), 0)};
           },
       .most = 14},
      {.name = "narrow then compute",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) { return Tensors{in[0].narrow(1, 1, 2).tanh() * in[0].narrow(1, 0, 2)}; },
       .most = 14},
  });
}

TEST(DimRules, Joins) {
  check_rules({
      {.name = "cat",
       .inputs = {sample({5, 3}), sample({2, 3}, 1)},
       .body =
           [](const Tensors& in) {
             return Tensors{at::cat({in[0], in[1]}, 0)};
           },
       .most = 30},
      {.name = "cat of columns",
       .inputs = {sample({3, 2}), sample({3, 4}, 1)},
       .body =
           [](const Tensors& in) {
             return Tensors{at::cat({in[0], in[1], in[0]}, -1)};
           },
       .most = 30},
      {.name = "stack",
       .inputs = {sample({3, 2}), sample({3, 2}, 1)},
       .body =
           [](const Tensors& in) {
             return Tensors{at::stack({in[0], in[1]}, 0), at::stack({in[0], in[1]}, 1),
                            at::stack({in[0], in[1]}, -1)};
           },
       .most = 30},
      {.name = "cat of promoted",
       .inputs = {sample({3, 2}), sample({3, 2}, 1).to(at::kDouble)},
       .body =
           [](const Tensors& in) {
             return Tensors{at::cat({in[0], in[1]}, 0)};
           },
       .most = 20},
  });
}

TEST(DimRules, ComplexNumbersAsPairs) {
  check_rules({{.name = "view_as_complex, view_as_real",
                .inputs = {sample({3, 4, 2})},
                .body =
                    [](const Tensors& in) {
                      return Tensors{
                          at::view_as_real(at::view_as_complex(in[0]) * at::view_as_complex(in[0]))};
                    },
                .most = 20}});
}

TEST(DimRules, InPlaceChangesOfShape) {
  check_rules({
      {.name = "t_, transpose_",
       .inputs = {sample({5, 3}), sample({3, 3}, 1)},
       .body =
           [](const Tensors& in) {
             Tensors out{in[0].clone(), in[1].clone(), in[1].clone()};
             out[0].t_();
             out[1].transpose_(0, 1);
             out[2].t_().mul_(2);
             return out;
           },
       .most = 30},
      {.name = "unsqueeze_",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             Tensors out{in[0].clone(), in[0].clone()};
             out[0].unsqueeze_(0);
             out[1].unsqueeze_(2);
             return out;
           },
       .most = 14},
      {.name = "squeeze_",
       .inputs = {sample({5, 1, 3})},
       .body =
           [](const Tensors& in) {
             Tensors out{in[0].clone(), in[0].clone()};
             out[0].squeeze_();
             out[1].squeeze_(1);
             return out;
           },
       .may_refuse = true,
       .most = 20},
  });
}

// Autograd propagates writes into views, by as_strided if necessary.
TEST(DimRules, WritesIntoViews) {
  check_rules({
      {.name = "a column",
       .inputs = {sample({5, 3}), sample({5}, 1)},
       .body =
           [](const Tensors& in) {
             at::Tensor y = in[0] * 2;
             y.select(1, 0).mul_(in[1]);
             return Tensors{y};
           },
       .partial = false,
       .may_refuse = true,
       .most = 14},
      {.name = "a slice and a row of it",
       .inputs = {sample({5, 4})},
       .body =
           [](const Tensors& in) {
             at::Tensor y = in[0] * 2;
             y.slice(1, 1, 3).select(0, 2).add_(1);
             return Tensors{y.tanh()};
           },
       .partial = false,
       .may_refuse = true,
       .most = 14},
      {.name = "a permuted slice",
       .inputs = {sample({3, 4, 2})},
       .body =
           [](const Tensors& in) {
             at::Tensor y = in[0] * 2;
             y.permute({2, 0, 1}).slice(2, 0, 4, 2).mul_(3);
             return Tensors{y};
           },
       .partial = false,
       .may_refuse = true,
       .most = 14},
      {.name = "the whole in other dims",
       .inputs = {sample({4, 3})},
       .body =
           [](const Tensors& in) {
             at::Tensor y = in[0] * 2;
             y.view({12}).mul_(3);
             y.unsqueeze(1).add_(1);
             return Tensors{y * y};
           },
       .partial = false,
       .may_refuse = true,
       .most = 14},
      {.name = "a diagonal",
       .inputs = {sample({4, 4})},
       .body =
           [](const Tensors& in) {
             at::Tensor y = in[0] * 2;
             y.diagonal().mul_(3);
             return Tensors{y};
           },
       .partial = false,
       .may_refuse = true,
       .most = 14},
      {.name = "a view of what is written",
       .inputs = {sample({4, 3})},
       .body =
           [](const Tensors& in) {
             at::Tensor y = in[0] * 2;
             const at::Tensor column = y.select(1, 1);
             y.mul_(3);
             return Tensors{y, column};
           },
       .partial = false,
       .may_refuse = true,
       .most = 14},
      {.name = "read by strides",
       .inputs = {sample({4, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].as_strided({2, 2}, {3, 1}, 4), in[0].as_strided({3}, {4}, 0),
                            in[0].as_strided({3, 4}, {1, 3}), in[0].as_strided({2, 1, 3}, {6, 1, 1}, 3)};
           },
       .backward = false,
       .most = 14},
  });
}

// If a view cuts a split dim, its part is a copy; writing into it is refused on every rank.
TEST(DimRules, WritesIntoCopiedViewsAreRefused) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const comm::MeshGroups mesh(world, init_device_mesh("cpu", {2}, {}, world.rank(), 2));
    const at::Tensor x = distribute_tensor(sample({4, 3}), mesh, {Shard{0}});
    EXPECT_THROW(x.select(0, 1).add_(1), StateError);
    // A copy cannot be read after its base has changed.
    const at::Tensor row = x.select(0, 1);
    EXPECT_TRUE(at::equal(full_tensor(row), sample({4, 3}).select(0, 1)));
    x.select(1, 1).add_(1);
    EXPECT_THROW(full_tensor(row), StateError);
    EXPECT_THROW(row * 2, StateError);
    at::Tensor expected = sample({4, 3});
    expected.select(1, 1).add_(1);
    EXPECT_TRUE(at::equal(full_tensor(x), expected));
    // Aliases as in one process.
    EXPECT_TRUE(x.as_strided({4}, {3}, 1).is_alias_of(x));
    x.as_strided({4}, {3}, 1).zero_();
    EXPECT_TRUE(at::equal(full_tensor(x).select(1, 1), at::zeros({4})));
  });
}

using Sizes = std::vector<std::int64_t>;

// Overloads that copy or are called by other operators; programs rarely call them directly.
TEST(DimRules, ByName) {
  check_rules({
      each_of("of one tensor", {sample({4, 6})},
              {{"t"},
               {"t_copy"},
               {"transpose.int", {{"dim0", 0}, {"dim1", 1}}},
               {"transpose_copy.int", {{"dim0", 0}, {"dim1", 1}}},
               {"permute", {{"dims", Sizes{1, 0}}}},
               {"permute_copy", {{"dims", Sizes{1, 0}}}},
               {"unsqueeze", {{"dim", 1}}},
               {"unsqueeze_copy", {{"dim", 1}}},
               {"expand", {{"size", Sizes{3, 4, 6}}}},
               {"expand_copy", {{"size", Sizes{3, 4, 6}}}},
               {"select.int", {{"dim", 1}, {"index", 2}}},
               {"select_copy.int", {{"dim", 1}, {"index", 2}}},
               {"slice.Tensor", {{"dim", 1}, {"start", 1}, {"end", 5}, {"step", 2}}},
               {"slice_copy.Tensor", {{"dim", 1}, {"start", 1}, {"end", 5}, {"step", 2}}},
               {"diagonal"},
               {"diagonal_copy"},
               {"view", {{"size", Sizes{2, 2, 6}}}},
               {"view_copy", {{"size", Sizes{2, 2, 6}}}},
               {"_unsafe_view", {{"size", Sizes{2, 2, 6}}}},
               {"_reshape_alias", {{"size", Sizes{2, 2, 6}}, {"stride", Sizes{12, 6, 1}}}},
               {"_reshape_copy", {{"size", Sizes{2, 2, 6}}}},
               {"unbind.int"},
               {"split.Tensor", {{"split_size", 3}, {"dim", 1}}},
               {"split_with_sizes", {{"split_sizes", Sizes{1, 5}}, {"dim", 1}}},
               {"unsafe_split.Tensor", {{"split_size", 3}, {"dim", 1}}},
               {"unsafe_split_with_sizes", {{"split_sizes", Sizes{1, 5}}, {"dim", 1}}},
               {"unfold", {{"dimension", 1}, {"size", 3}, {"step", 2}}},
               {"flip", {{"dims", Sizes{0}}}},
               {"roll", {{"shifts", Sizes{2}}, {"dims", Sizes{1}}}},
               {"tril"},
               {"triu"},
               {"repeat", {{"repeats", Sizes{2, 1}}}},
               {"squeeze"},
               {"glu"},
               {"constant_pad_nd", {{"pad", Sizes{1, 2}}, {"value", 3}}}},
              16),
      {.name = "of lists",
       .inputs = {sample({4, 3}), sample({4, 3}, 1)},
       .body =
           [](const Tensors& in) {
             const c10::IValue both(c10::List<at::Tensor>({in[0], in[1]}));
             Tensors out;
             for (const char* name : {"aten::cat", "aten::_cat", "aten::stack", "aten::_stack"})
               if (has_operator(name))
                 out.push_back(call_operator(name, {}, {{"tensors", both}, {"dim", 1}})[0]);
             return out;
           },
       .backward = false,
       .most = 16},
      {.name = "glu",
       .inputs = {sample({4, 6})},
       .body =
           [](const Tensors& in) {
             return Tensors{at::glu(in[0], 0), at::glu(in[0], 1)};
           },
       .most = 14},
      {.name = "views of complex numbers",
       .inputs = {sample({4, 3, 2})},
       .body =
           [](const Tensors& in) {
             const at::Tensor z = at::view_as_complex(in[0]);
             return Tensors{at::view_as_real(z), at::real(z), at::imag(z)};
           },
       .most = 14},
  });
}

}  // namespace rules_dims_test
}  // namespace penstock::test
