// Reductions, and tensors created like another, compared with one process.
#include <gtest/gtest.h>

#include <limits>

#include "tests/dtensor/operator_call.h"
#include "tests/dtensor/rule_checker.h"

namespace penstock::test {
namespace rules_reduction_test {

TEST(ReductionRules, SumsAndMeans) {
  check_rules({
      {.name = "sum",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].sum(), in[0].sum(0), in[0].sum(1, true), in[0].sum(at::IntArrayRef{0, 1})};
           },
       .most = 14},
      {.name = "mean",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].mean(), in[0].mean(0), in[0].mean(-1, true),
                            in[0].mean(0, false, at::kDouble)};
           },
       .most = 14},
      {.name = "sum of integers",
       .inputs = {sample_index({5, 3}, 9)},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].sum(), in[0].sum(0), (in[0] > 3).sum(1)};
           },
       .most = 14},
      {.name = "prod",
       .inputs = {sample({3, 2})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].prod(), in[0].prod(0), in[0].prod(1, true)};
           },
       .most = 14},
      {.name = "cumsum",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].cumsum(0), in[0].cumsum(1)};
           },
       .most = 14},
  });
}

TEST(ReductionRules, Extremes) {
  check_rules({
      {.name = "amax, amin",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].amax(0), in[0].amin(1, true), in[0].amax()};
           },
       .most = 14},
      {.name = "max, min",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].max(), in[0].min()};
           },
       .most = 14},
      {.name = "max of integers",
       .inputs = {sample_index({3, 2}, 50)},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].max(), in[0].amin(0), in[0].to(at::kByte).amin(0),
                            in[0].to(at::kInt).amax(0)};
           },
       .most = 14},
      {.name = "max with dim",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             const auto a = in[0].max(0);
             const auto b = in[0].min(1, true);
             return Tensors{std::get<0>(a), std::get<1>(a), std::get<0>(b), std::get<1>(b)};
           },
       .most = 14},
      {.name = "argmax, topk",
       .inputs = {sample({5, 4})},
       .body =
           [](const Tensors& in) {
             const auto top = in[0].topk(2, 1);
             return Tensors{in[0].argmax(), in[0].argmax(0), in[0].argmin(1, true), std::get<0>(top),
                            std::get<1>(top)};
           },
       .most = 14},
      {.name = "sort, median",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{std::get<0>(in[0].sort(0)), std::get<0>(in[0].median(1)),
                            std::get<0>(in[0].kthvalue(2, 0))};
           },
       .most = 14},
  });
}

TEST(ReductionRules, FirstOfEqualsAndNotANumber) {
  at::Tensor ties = sample_index({7, 3}, 3).to(at::kFloat), holes = sample({7, 3});
  holes[2][0] = std::numeric_limits<float>::quiet_NaN(),
  holes[5][0] = std::numeric_limits<float>::quiet_NaN();
  check_rules({
      {.name = "ties",
       .inputs = {ties},
       .body =
           [](const Tensors& in) {
             const auto a = in[0].max(0);
             return Tensors{in[0].argmax(0), in[0].argmin(0, true), std::get<0>(a),
                            (in[0] > 0).to(at::kByte).argmax(0)};
           },
       .backward = false,
       .partial = false,
       .most = 20},
      {.name = "NaN",
       .inputs = {holes},
       .body =
           [](const Tensors& in) {
             const auto a = in[0].min(0);
             return Tensors{in[0].argmax(0), std::get<0>(a), std::get<1>(a)};
           },
       .backward = false,
       .partial = false,
       .most = 20},
  });
}

TEST(ReductionRules, TruthAndSpread) {
  check_rules({
      {.name = "any, all",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{(in[0] > 1.9).any(), (in[0] > -1).all(0), (in[0] > 0).any(1, true),
                            (in[0] < 3).all()};
           },
       .backward = false,
       .most = 14},
      {.name = "var, std",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].var(), in[0].var(0, false), in[0].std(at::IntArrayRef{1}, true, true),
                            std::get<1>(at::var_mean(in[0], at::IntArrayRef{0}, true))};
           },
       .rtol = 1e-4,
       .most = 14},
      {.name = "logsumexp",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].logsumexp(0), in[0].logsumexp(at::IntArrayRef{0, 1}),
                            in[0].logsumexp(1, true)};
           },
       .most = 14},
      {.name = "count_nonzero",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{at::count_nonzero(in[0].relu(), c10::nullopt),
                            at::count_nonzero(in[0].relu(), at::IntArrayRef{0})};
           },
       .backward = false,
       .most = 14},
  });
}

TEST(ReductionRules, AlongADim) {
  check_rules({
      {.name = "running",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].cumprod(0), in[0].logcumsumexp(1), std::get<0>(in[0].cummax(0)),
                            std::get<0>(in[0].cummin(1))};
           },
       .rtol = 1e-4,
       .most = 14},
      each_of("by name", {sample({5, 3})},
              {{"mode"},
               {"median.dim", {{"dim", 0}}},
               {"nanmedian.dim", {{"dim", 1}}},
               {"kthvalue", {{"k", 2}, {"dim", 0}}},
               {"aminmax", {{"dim", 0}}},
               {"sort"},
               {"sort.stable", {{"stable", true}, {"dim", 0}}},
               {"argsort.stable", {{"stable", true}, {"dim", 0}}},
               {"topk", {{"k", 2}}},
               {"cummax", {{"dim", 1}}},
               {"cummin", {{"dim", 0}}},
               {"count_nonzero.dim_IntList", {{"dim", std::vector<std::int64_t>{0}}}},
               {"var.correction"},
               {"std.correction"},
               {"var_mean.correction"},
               {"std_mean.correction"}},
              14),
      // Into existing tensors.
      {.name = "max and min of a dim",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             const at::Tensor row = in[0].select(0, 0);
             Tensors out = call_operator(
                 "aten::max.dim_max", {in[0]},
                 {{"dim", 0}, {"max", at::empty_like(row)}, {"max_values", at::zeros_like(row, at::kLong)}});
             for (const at::Tensor& result : call_operator("aten::min.dim_min", {in[0]},
                                                           {{"dim", 0},
                                                            {"min", at::empty_like(row)},
                                                            {"min_indices", at::zeros_like(row, at::kLong)}}))
               out.push_back(result);
             return out;
           },
       .backward = false,
       .may_refuse = true,
       .most = 14},
  });
}

TEST(FactoryRules, LikeAnotherTensor) {
  check_rules({
      {.name = "like",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{at::zeros_like(in[0]), at::ones_like(in[0]), at::full_like(in[0], 3),
                            at::empty_like(in[0]).fill_(2), at::ones_like(in[0], at::kLong)};
           },
       .backward = false,
       .most = 14},
      {.name = "new",
       .inputs = {sample({5, 3})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0].new_zeros({5, 3}),
                            in[0].new_ones({2, 4}),
                            in[0].new_full({7}, 2),
                            in[0].new_empty({5, 3}).fill_(1),
                            in[0].new_empty_strided({3, 5}, {1, 3}).fill_(4),
                            in[0].new_zeros({})};
           },
       .backward = false,
       .most = 14},
      {.name = "item",
       .inputs = {sample({3, 2})},
       .body =
           [](const Tensors& in) {
             return Tensors{in[0] * in[0].sum().item<double>(), in[0] * (at::equal(in[0], in[0]) ? 2 : 3)};
           },
       .backward = false,
       .most = 14},
  });
}

}  // namespace rules_reduction_test
}  // namespace penstock::test
