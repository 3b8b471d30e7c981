// Elementwise operators, products and views on distributed tensors, against one process.
#include <gtest/gtest.h>

#include "tests/dtensor/rule_checker.h"

namespace penstock::test {
namespace rules_matmul_test {

TEST(PointwiseRules, BroadcastAndPromotion) {
  check_rules({
      {.name = "add",
       .inputs = {sample({5, 3}), sample({5, 3}, 1)},
       .body = [](const Tensors& in) { return Tensors{in[0] + in[1]}; }},
      {.name = "add broadcast",
       .inputs = {sample({5, 3}), sample({3}, 1)},
       .body = [](const Tensors& in) { return Tensors{in[0] + in[1]}; }},
      {.name = "sub of a column",
       .inputs = {sample({4, 3}), sample({4, 1}, 1)},
       .body = [](const Tensors& in) { return Tensors{in[0] - in[1]}; }},
      {.name = "mul",
       .inputs = {sample({5, 3}), sample({5, 3}, 1)},
       .body = [](const Tensors& in) { return Tensors{in[0] * in[1]}; }},
      {.name = "div",
       .inputs = {sample({5, 3}), sample({3}, 1)},
       .body = [](const Tensors& in) { return Tensors{in[0] / in[1]}; }},
      {.name = "numbers",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0] * 3 + 1, 2 - in[0], in[0] / 2, 1 / in[0]};
           }},
      {.name = "doubles and floats",
       .inputs = {sample({4, 3}), sample({4, 3}, 1).to(at::kDouble)},
       .body = [](const Tensors& in) { return Tensors{in[0] * in[1]}; }},
      {.name = "gelu, silu, tanh",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{at::gelu(in[0]), at::silu(in[0]), in[0].tanh(), in[0].relu()};
           }},
      {.name = "where",
       .inputs = {sample({4, 3}), sample({4, 3}, 1)},
       .body =
           [](const Tensors& in) {
             return Tensors{at::where(in[0] > 0, in[0], in[1]), in[0].masked_fill(in[1] > 0, 0.5)};
           }},
      {.name = "addcmul, lerp",
       .inputs = {sample({4, 3}), sample({4, 3}, 1), sample({4, 3}, 2)},
       .body =
           [](const Tensors& in) {
             return Tensors{at::addcmul(in[0], in[1], in[2], 0.5), at::lerp(in[0], in[1], in[2])};
           },
       .most = 60},
      {.name = "to double",
       .inputs = {sample({4, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].to(at::kDouble), in[0].to(at::kLong), in[0].clone(), in[0].detach()};
           }},
  });
}

TEST(PointwiseRules, InPlace) {
  check_rules({
      {.name = "add_",
       .inputs = {sample({5, 3}), sample({5, 3}, 1)},
       .body =
           [](const Tensors& in) {
             Tensors out{in[0].clone()};
             out[0].add_(in[1], 0.5);
             return out;
           },
       .may_refuse = true},
      {.name = "mul_ by a row",
       .inputs = {sample({5, 3}), sample({3}, 1)},
       .body =
           [](const Tensors& in) {
             Tensors out{in[0].clone()};
             out[0].mul_(in[1]);
             return out;
           },
       .may_refuse = true},
      {.name = "addcdiv_",
       .inputs = {sample({4, 3}), sample({4, 3}, 1), sample_positive({4, 3}, 2)},
       .body =
           [](const Tensors& in) {
             Tensors out{in[0].clone()};
             out[0].addcdiv_(in[1], in[2], -0.25);
             return out;
           },
       .may_refuse = true,
       .most = 60},
      {.name = "copy_, fill_, zero_",
       .inputs = {sample({4, 3}), sample({4, 3}, 1)},
       .body =
           [](const Tensors& in) {
             Tensors out{in[0].clone(), in[0].clone(), in[1].clone()};
             out[0].copy_(in[1]);
             out[1].fill_(2);
             out[2].zero_();
             return out;
           },
       .backward = false,
       .may_refuse = true},
      {.name = "into a view",
       .inputs = {sample({4, 3}), sample({4, 3}, 1)},
       .body =
           [](const Tensors& in) {
             Tensors out{in[0].clone()};
             out[0].view({4, 3}).mul_(in[1]);
             return out;
           },
       .may_refuse = true},
  });
}

TEST(MatmulRules, Products) {
  check_rules({
      {.name = "mm",
       .inputs = {sample({5, 4}), sample({4, 3}, 1)},
       .body = [](const Tensors& in) { return Tensors{in[0].mm(in[1])}; }},
      {.name = "addmm",
       .inputs = {sample({3}), sample({5, 4}, 1), sample({4, 3}, 2)},
       .body = [](const Tensors& in) { return Tensors{at::addmm(in[0], in[1], in[2])}; }},
      {.name = "addmm of a matrix",
       .inputs = {sample({5, 3}), sample({5, 4}, 1), sample({4, 3}, 2)},
       .body = [](const Tensors& in) { return Tensors{at::addmm(in[0], in[1], in[2], 0.5, 2)}; }},
      {.name = "bmm",
       .inputs = {sample({3, 5, 4}), sample({3, 4, 2}, 1)},
       .body = [](const Tensors& in) { return Tensors{in[0].bmm(in[1])}; }},
      {.name = "baddbmm",
       .inputs = {sample({3, 5, 2}), sample({3, 5, 4}, 1), sample({3, 4, 2}, 2)},
       .body = [](const Tensors& in) { return Tensors{at::baddbmm(in[0], in[1], in[2])}; },
       .most = 60},
      {.name = "mv and dot",
       .inputs = {sample({5, 4}), sample({4}, 1)},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].mv(in[1]), in[1].dot(in[1])};
           }},
      {.name = "matmul 3 by 2",
       .inputs = {sample({2, 3, 4}), sample({4, 5}, 1)},
       .body = [](const Tensors& in) { return Tensors{in[0].matmul(in[1])}; }},
      {.name = "matmul 4 by 4",
       .inputs = {sample({2, 4, 3, 5}), sample({2, 4, 5, 2}, 1)},
       .body = [](const Tensors& in) { return Tensors{in[0].matmul(in[1])}; }},
      {.name = "linear",
       .inputs = {sample({2, 3, 4}), sample({6, 4}, 1), sample({6}, 2)},
       .body = [](const Tensors& in) { return Tensors{torch::linear(in[0], in[1], in[2])}; }},
  });
}

TEST(ViewRules, SplitAndJoin) {
  check_rules({
      {.name = "join",
       .inputs = {sample({4, 3, 2})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].view({12, 2}), in[0].view({4, 6}), in[0].view({24})};
           }},
      {.name = "join uneven",
       .inputs = {sample({3, 5, 2})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].view({15, 2}), in[0].view({3, 10}), in[0].reshape({30})};
           }},
      {.name = "split",
       .inputs = {sample({12, 4})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].view({3, 4, 4}), in[0].view({4, 3, 2, 2}), in[0].view({2, 6, 4})};
           }},
      {.name = "there and back",
       .inputs = {sample({4, 6, 2})},
       .body =
           [](const Tensors& in) {
             return Tensors{(in[0].view({24, 2}) * 2).view({4, 6, 2}),
                            (in[0].view({24, 2}) * 2).view({2, 2, 6, 2})};
           }},
      {.name = "ones",
       .inputs = {sample({4, 1, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].view({4, 3}), in[0].squeeze(), in[0].squeeze(1), in[0].view({1, 4, 3, 1})};
           }},
      {.name = "squeeze of split dims",
       .inputs = {sample({2, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].squeeze(), in[0].squeeze(0)};
           }},
  });
}

TEST(MatmulRules, MatrixTimesVectorPlus) {
  check_rules({
      {.name = "addmv",
       .inputs = {sample({5}), sample({5, 4}, 1), sample({4}, 2)},
       .body = [](const Tensors& in) { return Tensors{at::addmv(in[0], in[1], in[2], 0.5, 2)}; },
       .most = 20},
      {.name = "addmv of a number",
       .inputs = {sample({1}), sample({5, 4}, 1), sample({4}, 2)},
       .body = [](const Tensors& in) { return Tensors{at::addmv(in[0], in[1], in[2])}; },
       .backward = false,
       .most = 20},
  });
}

TEST(MatmulRules, OfComplexNumbers) {
  check_rules({
      {.name = "vdot",
       .inputs = {sample({5, 2}), sample({5, 2}, 1)},
       .body =
           [](const Tensors& in) {
             return Tensors{
                 at::view_as_real(at::vdot(at::view_as_complex(in[0]), at::view_as_complex(in[1])))};
           },
       .backward = false,
       .most = 16},
  });
}

}  // namespace rules_matmul_test
}  // namespace penstock::test
