#include "tests/torch/operator_zoo.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <tuple>

#include "penstock/torch/compat/cpu_bfloat16.h"

namespace penstock::zoo {
namespace {

using Tensors = std::vector<at::Tensor>;
using Dims = std::vector<std::int64_t>;  // plain braces could be dimension names
namespace F = torch::nn::functional;
using torch::kBFloat16;
using torch::kBool;
using torch::kDouble;
using torch::kFloat;
using torch::kHalf;
using torch::kInt;
using torch::kLong;
using torch::randn;

// Inputs and outputs of one call, where x are the inputs.
#define IN(...) [] { return Tensors{__VA_ARGS__}; }
#define OUT(...) [](Tensors& x) { return Tensors{__VA_ARGS__}; }

at::Tensor longs(at::IntArrayRef sizes, std::int64_t high) { return torch::randint(0, high, sizes, kLong); }
at::Tensor bools(at::IntArrayRef sizes) { return torch::randint(0, 2, sizes, kLong).to(kBool); }
at::Tensor channels_last(at::IntArrayRef sizes) {
  return randn(sizes).contiguous(at::MemoryFormat::ChannelsLast);
}
at::Tensor strided() { return randn({3, 8}).slice(1, 0, 8, 2); }   // (3, 4) with gaps
at::Tensor turned() { return randn({4, 3}).t(); }                  // (3, 4) column-major
at::Tensor spread() { return randn({3, 1}).expand({3, 4}); }       // (3, 4) expanded from one column
at::Tensor cube() { return randn({2, 3, 4}).permute({2, 0, 1}); }  // (4, 2, 3)
at::Tensor positive(at::IntArrayRef sizes) { return torch::rand(sizes) + 0.5; }
at::Tensor definite() {
  const at::Tensor a = randn({4, 4});
  return a.matmul(a.t()) + 4 * torch::eye(4);
}

template <class... Values>
Tensors listed(const std::tuple<Values...>& values) {
  return std::apply([](const auto&... value) { return Tensors{value...}; }, values);
}

class Table {
 public:
  std::vector<OperatorCall> calls;

  template <class Inputs, class Run>
  void add(const std::string& name, Inputs inputs, Run run, bool differentiable = true) {
    calls.push_back({name,
                     [inputs] {
                       torch::manual_seed(5);
                       const at::NoGradGuard no_grad;
                       Tensors made = inputs();
                       // Tensors with their own memory, not views: only the results are compared.
                       for (at::Tensor& tensor : made)
                         tensor = at::empty({0}, tensor.options())
                                      .set_(tensor.storage(), tensor.storage_offset(), tensor.sizes(),
                                            tensor.strides());
                       return made;
                     },
                     run, differentiable});
  }
  // Older versions reject the real call.
  template <class Inputs, class Run>
  void newer(const std::string& name, Inputs inputs, Run run) {
    add(name, inputs, run);
    calls.back().may_be_refused = true;
  }
  // Without gradients: in-place and out= calls, and operators without derivatives.
  template <class Inputs, class Run>
  void plain(const std::string& name, Inputs inputs, Run run) {
    add(name, inputs, run, false);
  }
};

void add_unary(Table& table) {
  ensure_cpu_bfloat16();
  struct Unary {
    const char* name;
    at::Tensor (at::Tensor::*method)() const;
  };
  static const Unary all[] = {{"abs", &at::Tensor::abs},
                              {"neg", &at::Tensor::neg},
                              {"exp", &at::Tensor::exp},
                              {"expm1", &at::Tensor::expm1},
                              {"log", &at::Tensor::log},
                              {"log1p", &at::Tensor::log1p},
                              {"log2", &at::Tensor::log2},
                              {"log10", &at::Tensor::log10},
                              {"sqrt", &at::Tensor::sqrt},
                              {"rsqrt", &at::Tensor::rsqrt},
                              {"sin", &at::Tensor::sin},
                              {"cos", &at::Tensor::cos},
                              {"tan", &at::Tensor::tan},
                              {"asin", &at::Tensor::asin},
                              {"acos", &at::Tensor::acos},
                              {"atan", &at::Tensor::atan},
                              {"sinh", &at::Tensor::sinh},
                              {"cosh", &at::Tensor::cosh},
                              {"tanh", &at::Tensor::tanh},
                              {"sigmoid", &at::Tensor::sigmoid},
                              {"relu", &at::Tensor::relu},
                              {"erf", &at::Tensor::erf},
                              {"erfc", &at::Tensor::erfc},
                              {"floor", &at::Tensor::floor},
                              {"ceil", &at::Tensor::ceil},
                              {"trunc", &at::Tensor::trunc},
                              {"frac", &at::Tensor::frac},
                              {"sign", &at::Tensor::sign},
                              {"reciprocal", &at::Tensor::reciprocal},
                              {"square", &at::Tensor::square},
                              {"lgamma", &at::Tensor::lgamma},
                              {"digamma", &at::Tensor::digamma},
                              {"isnan", &at::Tensor::isnan},
                              {"isinf", &at::Tensor::isinf},
                              {"logical_not", &at::Tensor::logical_not},
                              {"signbit", &at::Tensor::signbit},
                              {"angle", &at::Tensor::angle},
                              {"erfinv", &at::Tensor::erfinv},
                              {"asinh", &at::Tensor::asinh},
                              {"sinc", &at::Tensor::sinc},
                              {"isfinite", &at::Tensor::isfinite},
                              {"deg2rad", &at::Tensor::deg2rad}};
  for (const Unary& unary : all) {
    const auto method = unary.method;
    table.add(std::string("unary_") + unary.name,
              IN(randn({3, 4}), turned(), strided(), spread(), cube(), randn({}), randn({0, 4}),
                 randn({3, 4}, kDouble), channels_last({2, 3, 4, 5})),
              [method](Tensors& x) {
                Tensors out;
                for (const at::Tensor& input : x) out.push_back((input.*method)());
                return out;
              });
  }
  table.plain("unary_integers", IN(longs({3, 4}, 5), longs({4, 3}, 5).t().to(kInt), bools({3, 4})),
              OUT(x[0].abs(), x[1].neg(), x[0].sqrt(), x[1].exp(), x[2].sin(), x[2].logical_not(),
                  x[2].bitwise_not(), x[1].bitwise_not(), x[0].relu(), x[0].isnan(), x[1].angle(),
                  x[0].sign(), x[2].sigmoid(), x[0].reciprocal()));
  table.add("unary_bfloat16", IN(turned().to(kBFloat16), randn({2, 3}).to(kBFloat16)),
            OUT(x[0].relu(), x[0].abs(), x[1].exp(), x[1].tanh(), x[0].sigmoid(), x[1].rsqrt(), x[0].neg(),
                at::gelu(x[1]), at::silu(x[0])));
  table.plain("unary_half", IN(turned().to(kHalf)),
              OUT(x[0].abs(), x[0].neg(), x[0].to(kFloat), x[0].clone(), x[0].isnan()));
  table.plain("unary_in_place", IN(randn({3, 4}), turned(), strided()),
              OUT(x[0].relu_(), x[1].abs_(), x[2].exp_(), x[0].neg_(), x[1].sigmoid_(), x[2].tanh_(),
                  x[0].zero_(), x[1].fill_(2), at::hardtanh_(x[2]), at::hardswish_(x[0]), x[1].logical_not_(),
                  x[0].nan_to_num_(), x[1].clamp_(0, 1), x[2].sqrt_(), at::silu_(x[0]), at::gelu_(x[1]),
                  at::leaky_relu_(x[0]), at::elu_(x[1]), x[0].round_(), x[0].pow_(2)));
  table.plain("unary_out", IN(turned(), torch::empty({0}), torch::empty({3, 4}), torch::empty({0}, kBool)),
              OUT(at::abs_out(x[1], x[0]), at::exp_out(x[2], x[0]), at::logical_not_out(x[3], x[0]),
                  at::sigmoid_out(x[2], x[0])));
  table.add("clamp", IN(randn({3, 4}), turned(), randn({4})),
            OUT(x[0].clamp(-1, 1), x[1].clamp_min(0), x[1].clamp_max(0.5), x[0].clamp(x[2], c10::nullopt),
                x[1].nan_to_num(), x[0].round(), at::logit(x[1].sigmoid()), x[0].pow(2), x[0].pow(0.5),
                at::pow(2, x[1]), x[0].sgn(), x[1].positive()));
}

void add_activations(Table& table) {
  table.add("activations",
            IN(randn({4, 6}), randn({6, 4}).t(), channels_last({2, 4, 3, 3}), randn({4, 6}, kDouble)),
            [](Tensors& x) {
              Tensors out;
              for (const at::Tensor& t : x)
                for (const at::Tensor& y : {at::gelu(t),           at::gelu(t, "tanh"),
                                            at::silu(t),           at::elu(t),
                                            at::leaky_relu(t),     at::softplus(t),
                                            at::hardtanh(t),       at::mish(t),
                                            at::glu(t, 1),         at::log_sigmoid(t),
                                            at::hardswish(t),      at::hardsigmoid(t),
                                            at::selu(t),           at::celu(t),
                                            at::relu6(t),          at::threshold(t, 0.1, 2),
                                            at::softshrink(t),     at::hardshrink(t),
                                            F::softsign(t),        at::softmax(t, 1),
                                            at::log_softmax(t, 1), at::softmax(t, 0, kFloat)})
                  out.push_back(y);
              return out;
            });
  table.add("prelu",
            IN(randn({2, 3, 4}), randn({3}), randn({1}), channels_last({2, 3, 4, 4}),
               randn({4, 3}).t().unsqueeze(0)),
            OUT(at::prelu(x[0], x[1]), at::prelu(x[0], x[2]), at::prelu(x[3], x[1]), at::prelu(x[4], x[1])));
  table.add("rrelu", IN(randn({3, 4})),
            OUT(at::rrelu(x[0], 0.1, 0.3, false), at::rrelu(x[0], 0.1, 0.3, true)));
  table.add("dropout", IN(randn({3, 4}), turned()),
            OUT(at::dropout(x[0], 0.3, true), at::dropout(x[1], 0.3, true), at::dropout(x[1], 0.3, false),
                at::feature_dropout(x[0], 0.5, true), at::alpha_dropout(x[0], 0.5, true)));
  table.add(
      "native_dropout", IN(randn({3, 4}), turned()),
      OUT(std::get<0>(at::native_dropout(x[0], 0.3, true)), std::get<0>(at::native_dropout(x[1], 0.3, true)),
          std::get<1>(at::native_dropout(x[1], 0.3, false))));
}

void add_binary(Table& table) {
  table.add("arithmetic",
            IN(randn({3, 4}), turned(), strided(), spread(), randn({4}), randn({}), randn({3, 4}, kDouble)),
            OUT(x[0] + x[1], x[1] - x[2], x[2] * x[3], x[0] / x[4], x[1] + x[5], x[5] * x[1], x[0] + x[6],
                x[6] * x[5], 2 - x[1], 1 / x[1], at::rsub(x[0], x[1]), x[0].remainder(1.5), x[1].fmod(0.7),
                at::div(x[0], x[1], "floor"), at::div(x[0], x[1], "trunc"), at::maximum(x[0], x[1]),
                at::minimum(x[2], x[4]), at::fmax(x[0], x[1]), at::fmin(x[0], x[1]), at::atan2(x[0], x[1]),
                at::hypot(x[0], x[1]), x[0].remainder(x[1]), x[0].fmod(x[1])));
  table.add("ternary", IN(randn({3, 4}), turned(), randn({4}), spread()),
            OUT(at::addcmul(x[0], x[1], x[2]), at::addcdiv(x[1], x[0], x[2]), at::lerp(x[0], x[1], 0.3),
                at::lerp(x[1], x[0], x[2]), at::where(x[0] > 0, x[1], x[2]), at::where(x[1] > 0, x[1], x[3]),
                at::where(x[0] > 0, x[1], 1.0), at::addcmul(x[1], x[1], x[1])));
  table.plain("where_types", IN(bools({3, 4}), longs({3, 4}, 4), bools({4, 3}).t(), randn({4, 3}).t()),
              OUT(at::where(x[0], x[1], x[1]), at::where(x[2], x[3], x[3]), at::where(x[2], x[1], x[1])));
  table.plain("comparison", IN(randn({3, 4}), turned(), longs({3, 4}, 4), bools({3, 4})),
              OUT(x[0] > x[1], x[0] <= 0.5, x[1] == x[1], x[2] != 2, x[2] < x[0], x[3] & (x[0] > 0),
                  x[3] | x[3], x[3] ^ x[3], x[3].logical_and(x[0]), x[1].logical_or(x[1]),
                  x[2].logical_xor(x[3]), at::isclose(x[0], x[0]), x[2].ge(x[2]), at::isin(x[2], x[2])));
  table.plain("integers", IN(longs({3, 4}, 9), longs({4, 3}, 9).t().to(kInt), torch::tensor(2)),
              OUT(x[0] + 1, x[0] * 0.5, x[0] + x[1], x[0] / 2, at::floor_divide(x[0], 2),
                  at::floor_divide(x[0] * 0.5, x[1]), x[1] % 3, x[0].bitwise_and(x[0]), x[1].bitwise_or(x[1]),
                  at::bitwise_left_shift(x[0], 1), x[0] + x[2], x[1] * x[2], x[1].bitwise_xor(x[1]),
                  at::__lshift__(x[1], 1), at::remainder(7, x[0] + 1), at::gcd(x[0], x[0])));
  table.plain("promotion",
              IN(randn({3}).to(kBFloat16), randn({3}).to(kHalf), torch::ones({3}), longs({3}, 5), bools({3})),
              OUT(x[0] + x[2], x[1] * x[2], x[0] + 1, x[0] * x[3], x[1] + x[4], x[3] + x[4], x[4] + x[4],
                  x[4] * 2, x[0].add(x[2].sum())));
  table.plain("arithmetic_in_place", IN(randn({3, 4}), turned(), randn({4}), longs({3, 4}, 5)),
              OUT(x[0].add_(x[1]), x[1].mul_(x[2]), x[0].sub_(1), x[1].div_(2), x[0].addcmul_(x[1], x[2]),
                  x[0].addcdiv_(x[1], x[2], 0.1), x[0].lerp_(x[1], 0.5), x[3].add_(1), x[3].floor_divide_(2),
                  x[3].bitwise_and_(3), x[0].gt_(0), x[0].remainder_(2), x[0].copy_(x[3]), x[1].copy_(x[2]),
                  x[0].atan2_(x[1]), x[0].masked_fill_(x[1] > 0, 1.0)));
  table.plain("arithmetic_out",
              IN(randn({3, 4}), turned(), torch::empty({0}), torch::empty({3, 4}), torch::empty({0})),
              OUT(at::add_out(x[2], x[1], x[1]), at::mul_out(x[3], x[0], x[1]),
                  at::where_out(x[4], x[0] > 0, x[0], x[1])));
}

// Gradients of max, min, median and prod over everything are tested for dense inputs only: LibTorch chooses
// their formula by the values of a real tensor and by the kind of a wrapped one, and the strides differ.
void add_reductions(Table& table) {
  table.add("reduce_all", IN(randn({3, 4}), turned(), randn({}), cube()),
            OUT(x[0].sum(), x[1].mean(), x[2].sum(), x[0].std(), x[1].var(), x[0].max(), x[0].min(),
                x[0].norm(), x[3].norm(1), x[0].median(), x[1].logsumexp(Dims{0, 1}), at::nansum(x[0]),
                x[0].amax(), x[1].amin(), at::linalg_vector_norm(x[3]), x[0].nanmedian(), at::nanmean(x[1])));
  table.add("reduce_dims", IN(randn({3, 4}), turned(), cube(), channels_last({2, 3, 4, 5}), strided()),
            OUT(x[0].sum(0), x[1].sum(1, true), x[2].sum(Dims{0, 2}), x[3].mean(Dims{2, 3}, true),
                x[3].sum(Dims{2, 3}), x[2].mean(-1), x[0].prod(0), x[2].std(Dims{1}, true, true),
                x[1].var(Dims{0}, false, false), x[3].var(Dims{0, 2, 3}), x[2].amax({0, 1}, true),
                x[1].amin(1), x[2].logsumexp(Dims{1}, true), x[1].norm(2, 0), x[3].norm(2, {1}, true),
                x[4].sum(1), x[4].std(Dims{0}, true, false)));
  table.add("var_mean", IN(cube(), randn({3, 4})), [](Tensors& x) {
    Tensors out = listed(at::var_mean(x[0], Dims{1}, true, true));
    for (const at::Tensor& t : listed(at::std_mean(x[1], true))) out.push_back(t);
    return out;
  });
  table.add("max_min_along", IN(randn({3, 4}), cube()), [](Tensors& x) {
    Tensors out;
    for (const Tensors& some :
         {listed(x[0].max(1)), listed(x[1].min(0, true)), listed(x[1].max(-1)), listed(x[0].median(1)),
          listed(x[1].kthvalue(2, 0)), listed(at::mode(x[0], 1)), listed(x[1].cummax(0)),
          listed(x[0].cummin(1)), listed(at::nanmedian(x[1], 1, true))})
      out.insert(out.end(), some.begin(), some.end());
    return out;
  });
  table.plain("arg_reductions", IN(randn({3, 4}), cube(), bools({3, 4}), longs({3, 4}, 3)),
              OUT(std::get<0>(at::aminmax(x[0])), std::get<1>(at::aminmax(x[1], 1, true)), x[0].argmax(),
                  x[1].argmax(1), x[1].argmin(0, true), x[2].any(), x[2].all(1), x[0].any(0, true),
                  x[3].sum(), x[2].sum(0), x[3].prod(), at::count_nonzero(x[3], at::IntArrayRef({0})),
                  x[3].max(), x[3].sum(1, false, kFloat), x[0].sum(kDouble), x[3].sum(Dims{0}, true),
                  at::count_nonzero(x[0]), x[3].cumsum(1)));
  table.add("scans", IN(randn({3, 4}), turned(), cube()),
            OUT(x[0].cumsum(0), x[1].cumsum(1), x[2].cumprod(1), x[0].logcumsumexp(1), x[1].logcumsumexp(0),
                x[1].cumsum(0, kDouble), at::diff(x[0])));
  table.add("sorting", IN(randn({3, 4}), cube(), turned()), [](Tensors& x) {
    Tensors out;
    for (const Tensors& some :
         {listed(x[0].sort(1)), listed(x[1].sort(0, true)), listed(x[0].topk(2)), listed(x[1].topk(1, 0)),
          listed(x[2].sort(true, 0, false)), Tensors{x[2].argsort(std::int64_t{1}, false), at::msort(x[0])},
          listed(x[2].topk(2, 1))})
      out.insert(out.end(), some.begin(), some.end());
    return out;
  });
  table.plain("argsort_histogram", IN(randn({3, 4}), randn({4}), torch::linspace(-1, 1, 5)),
              OUT(at::argsort(x[0], 0, true), at::histc(x[1], 4, -1, 1), at::bucketize(x[0], x[2]),
                  at::searchsorted(x[2], x[1]), at::bucketize(x[0], x[2], true)));
  table.plain("reduction_out", IN(turned(), torch::empty({0}), torch::empty({0}), torch::empty({3, 1})),
              OUT(at::sum_out(x[1], x[0], Dims{0}), at::std_out(x[2], x[0], Dims{0}, true, false),
                  at::mean_out(x[3], x[0], Dims{1}, true)));
}

void add_matrices(Table& table) {
  table.add(
      "products",
      IN(randn({3, 4}), randn({4, 5}), randn({5}), randn({2, 3, 4}), randn({2, 4, 5}), randn({5, 4}).t(),
         turned()),
      OUT(x[0].mm(x[1]), x[0].matmul(x[5]), at::addmm(x[2], x[0], x[1]), x[3].bmm(x[4]), x[3].matmul(x[1]),
          x[1].matmul(x[2]), at::mv(x[1], x[2]), at::dot(x[2], x[2]), at::outer(x[2], x[2]),
          at::baddbmm(x[3].matmul(x[4]), x[3], x[4]), at::addmv(x[0].select(1, 0), x[0], x[1].select(1, 0)),
          x[6].mm(x[1]), at::addr(x[0], x[0].select(1, 0), x[0].select(0, 0)), at::vdot(x[2], x[2]),
          at::addbmm(x[0].mm(x[1]), x[3], x[4]), at::einsum("bij,bjk->ik", {x[3], x[4]}),
          at::tensordot(x[3], x[1], {2}, {0}), at::kron(x[0], x[2]), at::inner(x[0], x[0])));
  table.add("linear",
            IN(randn({2, 3, 4}), randn({5, 4}), randn({5}), randn({3, 2, 4}).transpose(0, 1), randn({4}),
               randn({2, 3, 4}, kDouble), randn({5, 4}, kDouble)),
            OUT(at::linear(x[0], x[1], x[2]), at::linear(x[3], x[1]), at::linear(x[3], x[1], x[2]),
                at::linear(x[4], x[1], x[2]), at::linear(x[5], x[6]),
                F::bilinear(x[0], x[0], x[0].new_ones({2, 4, 4}))));
  table.add("linear_bfloat16",
            IN(randn({3, 4}).to(kBFloat16), randn({5, 4}).to(kBFloat16), randn({5}).to(kBFloat16)),
            OUT(at::linear(x[0], x[1], x[2])));
  table.add(
      "linalg", IN(definite(), randn({4, 2}), randn({2, 4, 4})),
      OUT(at::linalg_cholesky(x[0]), at::inverse(x[0]), at::linalg_inv(x[2]), at::linalg_det(x[2]),
          at::linalg_solve(x[0], x[1]), at::linalg_norm(x[1]), at::trace(x[0]), at::linalg_cholesky(x[0]),
          at::linalg_matrix_norm(x[1]), at::cholesky_solve(x[1], x[0].tril()),
          at::linalg_solve_triangular(x[0].triu(), x[1], true), at::logdet(x[0])));
  table.add("triangles", IN(randn({4, 4}), randn({4}), randn({2, 3, 3}).transpose(1, 2)),
            OUT(x[0].tril(), x[0].triu(1), at::diag(x[1]), at::diag(x[0]), x[0].diagonal(1),
                at::diag_embed(x[1]), x[2].tril(), x[2].triu()));
  table.add("distances", IN(randn({3, 4}), randn({5, 4}), randn({2, 3, 4})),
            OUT(at::cdist(x[0], x[1]), at::cdist(x[0], x[1], 1), at::cdist(x[2], x[1]), at::pdist(x[1]),
                F::pairwise_distance(x[0], x[0] + 1), at::cosine_similarity(x[0], x[0] * 2, 1)));
}

void add_shapes(Table& table) {
  table.add("views", IN(randn({4, 6}), cube(), channels_last({2, 3, 4, 5})),
            OUT(x[0].view({2, 12}), x[0].t(), x[1].permute({1, 2, 0}), x[0].select(0, 1),
                x[0].slice(1, 1, 5, 2), x[0].narrow(0, 1, 2), x[0].unsqueeze(1), x[0].unsqueeze(0).squeeze(0),
                x[0].expand({3, 4, 6}), x[1].transpose(0, 2), x[0].diagonal(), x[0].unfold(1, 3, 2),
                x[0].as_strided({2, 2}, {1, 3}, 4), x[0].reshape({24}), x[1].reshape({8, 3}), x[2].flatten(1),
                x[0].view_as(x[0]), x[2].movedim(1, 3), x[0].detach(), x[1].swapaxes(0, 1),
                x[0].unflatten(1, {2, 3}), x[0].alias(), x[0].mT(), x[2].flatten(2).transpose(1, 2)));
  table.add("view_lists", IN(randn({4, 6}), cube()), [](Tensors& x) {
    Tensors out;
    for (const Tensors& some : {x[0].split(2, 1), x[0].split_with_sizes({1, 2, 3}, 1), x[0].unbind(0),
                                x[1].chunk(2, 0), x[0].tensor_split(3, 1), x[0].hsplit(2)})
      out.insert(out.end(), some.begin(), some.end());
    return out;
  });
  table.add("joining",
            IN(randn({2, 3}), randn({3, 2}).t(), randn({2, 3}), channels_last({1, 2, 3, 3}),
               channels_last({2, 2, 3, 3}), randn({2, 3}, kDouble)),
            OUT(at::cat({x[0], x[1]}, 0), at::cat({x[1], x[1]}, 1), at::stack({x[0], x[1]}),
                at::stack({x[0], x[2]}, 2), at::cat({x[3], x[4]}, 0), at::cat({x[0], x[5]}),
                at::vstack({x[0], x[1]}), at::hstack({x[0], x[2]}), at::cat({x[0], x[0].new_empty({0})})));
  table.add("copies", IN(turned(), strided(), spread(), cube(), channels_last({2, 3, 4, 5})),
            OUT(x[0].clone(), x[1].clone(), x[2].clone(), x[3].contiguous(), x[4].clone(), x[4].contiguous(),
                x[0].to(kDouble), x[1].to(kBFloat16), x[3].to(kFloat), x[4].to(kDouble),
                x[0].clone(at::MemoryFormat::Contiguous), x[0].repeat({2, 1, 2}),
                x[3].repeat_interleave(2, 1), x[0].tile({2, 2}), x[3].flip({0, 2}), x[0].roll({1}, {0}),
                x[0].roll({1, 2}, {0, 1}), x[3].roll({5}, {}), x[0].rot90(), x[3].flatten(),
                x[0].contiguous(), x[1].contiguous(), x[0].t().contiguous(), x[0].type_as(x[1])));
  table.add("padding",
            IN(randn({2, 3, 5}), randn({2, 3, 5, 6}), channels_last({2, 3, 5, 6}), randn({1, 2, 3, 4, 5})),
            OUT(at::constant_pad_nd(x[0], {1, 2}), at::pad(x[0], {1, 1}, "reflect"),
                at::pad(x[0], {1, 1}, "replicate"), at::pad(x[1], {1, 2, 1, 0}, "reflect"),
                at::pad(x[2], {1, 2, 1, 0}, "reflect"), at::pad(x[1], {1, 1, 1, 1}, "replicate"),
                at::pad(x[0], {1, 1}, "circular"), at::pad(x[3], {1, 1, 1, 1, 1, 1}, "replicate"),
                at::constant_pad_nd(x[2], {1, 1})));
  table.plain("shape_in_place", IN(randn({3, 4}), randn({2, 3}), randn({2, 1, 3}), randn({4, 6}), randn({6})),
              OUT(x[0].t_(), x[1].resize_({3, 5}), x[2].squeeze_(1), x[3].transpose_(0, 1),
                  x[4].unsqueeze_(0), x[0].as_strided_({2, 2}, {1, 2}), x[3].swapdims_(0, 1)));
  table.plain("like", IN(turned(), channels_last({2, 3, 4, 5}), strided(), longs({3}, 4), spread()),
              OUT(at::empty_like(x[0]), at::zeros_like(x[1]), at::ones_like(x[2]), at::full_like(x[0], 3),
                  at::rand_like(x[2]), at::randn_like(x[1]), at::randint_like(x[0], 5),
                  at::zeros_like(x[3], kFloat), at::empty_like(x[4]), x[0].new_empty({2, 2}),
                  x[1].new_zeros({3}), x[3].new_ones({2}), x[0].new_full({2}, 1.5)));
  table.plain("factories", IN(randn({1})),
              OUT(torch::empty({2, 3}), torch::zeros({2, 3}, kLong), torch::ones({4}, kBFloat16),
                  torch::full({2}, 7), torch::full({2}, 1.5), torch::arange(5), torch::arange(1, 9, 2),
                  torch::arange(0.0, 1.0, 0.25), torch::linspace(0, 1, 5), torch::eye(3),
                  torch::eye(2, 4, kDouble), torch::rand({3}), torch::randn({3, 2}, kDouble),
                  torch::randint(0, 5, {4}), torch::randperm(6), torch::empty_strided({2, 3}, {1, 2}),
                  torch::logspace(0, 1, 4), torch::tril_indices(4, 3), torch::triu_indices(3, 4, 1),
                  torch::scalar_tensor(2.0), torch::zeros({0, 3}), torch::hann_window(5)));
  table.plain("random_in_place", IN(randn({3, 4}), turned(), longs({4}, 5)),
              OUT(x[0].normal_(), x[1].uniform_(), x[0].bernoulli_(0.3), x[2].random_(10),
                  x[1].exponential_(), x[0].log_normal_(), x[1].cauchy_(), x[0].geometric_(0.5)));
  table.plain("random", IN(positive({3, 4}), positive({4})),
              OUT(at::bernoulli(x[0].clamp(0, 1)), at::multinomial(x[0], 2), at::multinomial(x[1], 3, true),
                  at::poisson(x[0]), at::normal(x[0], 1.0), at::binomial(x[1].round(), x[1].clamp(0, 1)),
                  at::_standard_gamma(x[0])));
  table.add("complex_parts", IN(randn({3, 4})),
            OUT(at::view_as_real(at::view_as_complex(x[0].view({3, 2, 2}).contiguous())),
                at::abs(at::view_as_complex(x[0].view({3, 2, 2}).contiguous()))));
}

void add_indexing(Table& table) {
  table.add(
      "gathering",
      IN(randn({5, 3}), torch::tensor({1, 3}), longs({5, 2}, 3), longs({2, 3}, 5), randn({3, 5}).t()),
      OUT(x[0].index({x[1]}), x[0].index_select(0, x[1]), x[4].index_select(0, x[1]), x[0].gather(1, x[2]),
          at::take(x[0], x[2]), x[4].gather(1, x[2]), at::take_along_dim(x[0], x[2], 1),
          x[0].index_select(1, x[1].clamp(0, 2)), x[4].index({x[1]})));
  table.add(
      "advanced_indexing",
      IN(randn({4, 5, 6}), torch::tensor({1, 3}), torch::tensor({0, 2}), randn({6, 5, 4}).permute({2, 1, 0})),
      OUT(x[0].index({x[1], x[2]}), x[0].index({torch::indexing::Slice(), x[1]}),
          x[0].index({x[1], torch::indexing::Slice(), x[2]}),
          x[0].index({torch::indexing::Slice(), x[1], x[2]}), x[3].index({x[1]}),
          x[3].index({torch::indexing::Slice(), x[1]}),
          x[3].index({torch::indexing::Slice(), torch::indexing::Slice(), x[1].unsqueeze(1)}),
          x[0].index({x[1].unsqueeze(1), x[2]}), x[0].index({1, torch::indexing::Slice(1, 3)}),
          x[0].index({torch::indexing::None, torch::indexing::Ellipsis, 2})));
  table.add("scattering", IN(randn({5, 3}), torch::tensor({1, 3}), longs({2, 3}, 5), randn({2, 3}), turned()),
            OUT(x[0].scatter(0, x[2], x[3]), x[0].scatter_add(0, x[2], x[3]), x[0].index_add(0, x[1], x[3]),
                x[0].index_copy(0, x[1], x[3]), x[0].index_fill(0, x[1], 2.0),
                x[0].masked_fill(x[0] > 0, 1.0), x[4].masked_fill(x[4] > 0, -1e9), x[0].scatter(0, x[2], 1.0),
                at::index_put(x[0], c10::List<c10::optional<at::Tensor>>({x[1]}), x[3]),
                x[0].scatter_reduce(0, x[2], x[3], "sum"), at::select_scatter(x[0], x[3].select(0, 0), 0, 1),
                at::slice_scatter(x[0], x[3], 0, 0, 2)));
  table.plain(
      "scattering_in_place",
      IN(randn({5, 3}), torch::tensor({1, 3}), longs({2, 3}, 5), randn({2, 3}), bools({5, 3})),
      OUT(x[0].masked_scatter(x[4], x[0]), x[0].masked_scatter_(x[4], x[0]), x[0].scatter_(0, x[2], x[3]),
          x[0].scatter_add_(0, x[2], x[3]), x[0].index_add_(0, x[1], x[3]), x[0].index_copy_(0, x[1], x[3]),
          x[0].index_fill_(0, x[1], 2.0), x[0].index_put_({x[1]}, x[3]),
          x[0].index_put_({x[4]}, torch::tensor(1.0)), x[0].masked_fill_(x[4], 0.0),
          x[0].put_(x[1], x[3].select(1, 0).slice(0, 0, 2)), x[0].fill_diagonal_(1),
          x[0].select(0, 1).zero_(), x[0].tril_(), x[0].clamp_min_(0)));
  table.add("embedding",
            IN(randn({10, 4}), longs({2, 3}, 10), longs({4}, 10).to(kInt), randn({4, 10}).t(),
               randn({10, 4}).to(kBFloat16)),
            OUT(at::embedding(x[0], x[1]), at::embedding(x[0], x[2], 0), at::embedding(x[3], x[1]),
                at::embedding(x[4], x[1])));
  for (const std::int64_t mode : {0, 1, 2})
    table.add("embedding_bag_" + std::to_string(mode),
              IN(randn({10, 4}), longs({6}, 10), torch::tensor({0, 2, 5}), randn({10, 4}, kDouble)),
              [mode](Tensors& x) {
                return Tensors{std::get<0>(at::embedding_bag(x[0], x[1], x[2], false, mode)),
                               std::get<0>(at::embedding_bag(x[3], x[1], x[2], false, mode))};
              });
  table.add(
      "unfolding", IN(randn({1, 2, 4, 4}), channels_last({2, 3, 5, 5}), randn({2, 6}), randn({1, 8, 9})),
      OUT(at::im2col(x[0], {2, 2}, {1, 1}, {0, 0}, {1, 1}), at::im2col(x[1], {3, 3}, {1, 1}, {1, 1}, {2, 2}),
          x[2].unfold(1, 2, 2), at::col2im(x[3], {4, 4}, {2, 2}, {1, 1}, {0, 0}, {1, 1}),
          at::pixel_shuffle(x[0].repeat({1, 2, 1, 1}), 2), at::pixel_unshuffle(x[0], 2)));
  table.plain("channel_shuffle", IN(randn({1, 4, 3, 3}), channels_last({1, 4, 3, 3})),
              OUT(at::channel_shuffle(x[0], 2), at::channel_shuffle(x[1], 2)));
}

void add_networks(Table& table) {
  table.add(
      "conv1d",
      IN(randn({2, 4, 9}), randn({6, 4, 3}), randn({6}), randn({6, 2, 3}), randn({4, 3, 3}), randn({4, 9})),
      OUT(at::conv1d(x[0], x[1], x[2]), at::conv1d(x[0], x[1], {}, 2, 1),
          at::conv1d(x[0], x[3], x[2], 1, 1, 1, 2), at::conv1d(x[0], x[1], {}, 1, 2, 2),
          at::conv_transpose1d(x[0], x[4], {}, 2), at::conv1d(x[5], x[1], x[2]),
          at::conv1d(x[0], x[1], x[2], 1, "same")));
  table.add("conv2d",
            IN(randn({2, 4, 7, 8}), randn({6, 4, 3, 3}), randn({6}), randn({6, 2, 3, 3}), randn({4, 3, 3, 3}),
               randn({4, 1, 3, 3}), randn({4, 7, 8}), randn({0, 4, 7, 8})),
            OUT(at::conv2d(x[0], x[1], x[2]), at::conv2d(x[0], x[1], {}, 2, 1),
                at::conv2d(x[0], x[3], x[2], 1, 1, 1, 2), at::conv2d(x[0], x[1], {}, 1, 2, 2),
                at::conv_transpose2d(x[0], x[4], {}, 2, 1, 1), at::conv2d(x[0], x[5], {}, 1, 1, 1, 4),
                at::conv2d(x[6], x[1]), at::conv2d(x[0], x[1].slice(2, 0, 1).slice(3, 0, 1)),
                at::conv2d(x[7], x[1])));
  table.add("conv2d_channels_last",
            IN(channels_last({2, 4, 7, 8}), randn({6, 4, 3, 3}), randn({6}), channels_last({6, 4, 3, 3}),
               channels_last({4, 3, 3, 3}), randn({2, 4, 7, 8}), channels_last({6, 2, 3, 3})),
            OUT(at::conv2d(x[0], x[1], x[2]), at::conv2d(x[5], x[3], {}, 2, 1),
                at::conv2d(x[0], x[3], x[2], 1, 2, 2), at::conv_transpose2d(x[0], x[4], {}, 2),
                at::conv2d(x[0], x[6], x[2], 1, Dims{0}, 1, 2),
                at::conv2d(x[0], x[1].slice(2, 0, 1).slice(3, 0, 1))));
  table.add("conv2d_double",
            IN(channels_last({2, 4, 7, 8}).to(kDouble), randn({6, 4, 3, 3}, kDouble),
               randn({6, 2, 3, 3}, kDouble), randn({4, 3, 3, 3}, kDouble)),
            OUT(at::conv2d(x[0], x[1]), at::conv2d(x[0], x[2], {}, 1, 1, 1, 2),
                at::conv2d(x[0], x[1], {}, 1, 2, 2), at::conv_transpose2d(x[0], x[3])));
  table.add("conv3d", IN(randn({1, 2, 5, 5, 5}), randn({3, 2, 3, 3, 3}), randn({3}), randn({2, 3, 2, 2, 2})),
            OUT(at::conv3d(x[0], x[1], x[2]), at::conv3d(x[0], x[1], {}, 2, 1),
                at::conv_transpose3d(x[0], x[3], {}, 2), at::conv3d(x[0], x[1], {}, 1, 2, 2)));
  table.add(
      "layer_norm",
      IN(randn({3, 4, 8}), randn({8}), randn({8}), randn({4, 3, 8}).transpose(0, 1), randn({4, 8}),
         randn({3, 4, 8}, kDouble)),
      OUT(at::layer_norm(x[0], {8}, x[1], x[2]), at::layer_norm(x[0], {8}), at::layer_norm(x[3], {8}, x[1]),
          at::layer_norm(x[3], {4, 8}, x[4], x[4]), at::layer_norm(x[5], {8})));
  table.plain(
      "native_norms",
      IN(randn({3, 8}), randn({8}), randn({3, 8}).to(kBFloat16), randn({8}).to(kBFloat16), randn({2, 4, 5})),
      [](Tensors& x) {
        Tensors out;
        for (const Tensors& some : {listed(at::native_layer_norm(x[0], {8}, x[1], x[1], 1e-5)),
                                    listed(at::native_layer_norm(x[2], {8}, x[3], x[3], 1e-5)),
                                    listed(at::native_layer_norm(x[2], {8}, {}, {}, 1e-5)),
                                    listed(at::native_group_norm(x[4], {}, {}, 2, 4, 5, 2, 1e-5)),
                                    listed(at::native_batch_norm(x[4], {}, {}, {}, {}, true, 0.1, 1e-5))})
          out.insert(out.end(), some.begin(), some.end());
        return out;
      });
  table.newer("layer_norm_mixed", IN(randn({3, 8}).to(kBFloat16), randn({8}), randn({8}).to(kBFloat16)),
              OUT(at::layer_norm(x[0], {8}, x[1], x[1]), at::layer_norm(x[0], {8}, x[2], x[2])));
  table.newer("native_layer_norm_mixed", IN(randn({3, 8}).to(kBFloat16), randn({8})),
              [](Tensors& x) { return listed(at::native_layer_norm(x[0], {8}, x[1], x[1], 1e-5)); });
  table.add("batch_norm",
            IN(randn({4, 3}), randn({2, 3, 4, 5}), channels_last({2, 3, 4, 5}), randn({3}), randn({3}),
               randn({2, 5, 3}).transpose(1, 2)),
            [](Tensors& x) {
              Tensors out;
              for (const bool training : {true, false})
                for (const std::size_t i : {0, 1, 2, 5})
                  out.push_back(at::batch_norm(x[i], x[3], x[4], x[3].new_zeros({3}), x[3].new_ones({3}),
                                               training, 0.1, 1e-5, false));
              out.push_back(at::batch_norm(x[1], {}, {}, {}, {}, true, 0.1, 1e-5, false));
              out.push_back(at::instance_norm(x[1], x[3], x[4], {}, {}, true, 0.1, 1e-5, false));
              return out;
            });
  table.newer(
      "batch_norm_mixed", IN(randn({4, 3, 5}).to(kBFloat16), randn({3})),
      OUT(at::batch_norm(x[0], x[1], x[1], x[1].new_zeros({3}), x[1].new_ones({3}), true, 0.1, 1e-5, false)));
  table.add("group_norm",
            IN(randn({2, 4, 5}), randn({4}), randn({4}), channels_last({2, 4, 3, 3}),
               randn({2, 5, 4}).transpose(1, 2)),
            OUT(at::group_norm(x[0], 2, x[1], x[2]), at::group_norm(x[0], 2),
                at::group_norm(x[3], 2, x[1], x[2]), at::group_norm(x[4], 4, x[1], x[2])));
  table.add("pooling2d", IN(randn({2, 3, 8, 9}), channels_last({2, 3, 8, 9}), randn({3, 8, 9})),
            [](Tensors& x) {
              Tensors out;
              for (const at::Tensor& t : x)
                for (const at::Tensor& y :
                     {at::max_pool2d(t, 2), at::avg_pool2d(t, 3, 2), at::avg_pool2d(t, 2, 2, 1, true),
                      at::adaptive_avg_pool2d(t, {2, 3}), at::adaptive_avg_pool2d(t, {1, 1}),
                      at::max_pool2d(t, {3, 3}, {2, 2}, {1, 1}, {1, 1}, true),
                      std::get<0>(at::adaptive_max_pool2d(t, {2, 2})),
                      std::get<1>(at::max_pool2d_with_indices(t, 2))})
                  out.push_back(y);
              return out;
            });
  table.add("pooling1d", IN(randn({2, 3, 9})),
            OUT(at::max_pool1d(x[0], 2), at::avg_pool1d(x[0], 2), at::adaptive_avg_pool1d(x[0], 4),
                std::get<0>(at::adaptive_max_pool1d(x[0], 3))));
  table.add("pooling3d",
            IN(randn({1, 2, 4, 5, 6}), randn({1, 2, 4, 5, 6}).contiguous(at::MemoryFormat::ChannelsLast3d)),
            OUT(at::max_pool3d(x[0], 2), at::avg_pool3d(x[0], 2), at::adaptive_avg_pool3d(x[0], {2, 2, 2}),
                at::max_pool3d(x[1], 2), at::adaptive_avg_pool3d(x[1], {2, 2, 2}),
                at::max_pool3d(x[0], {2, 2, 2}, {2, 2, 2}, {1, 1, 1}, {1, 1, 1}, true)));
  table.add("unpooling", IN(randn({1, 2, 4, 4})), [](Tensors& x) {
    const auto [pooled, indices] = at::max_pool2d_with_indices(x[0], 2);
    return Tensors{at::max_unpool2d(pooled, indices, {4, 4})};
  });
  table.add(
      "upsampling",
      IN(randn({1, 2, 3}), randn({1, 2, 3, 4}), channels_last({1, 4, 3, 4}), randn({1, 2, 3, 3, 3})),
      OUT(at::upsample_nearest1d(x[0], {6}), at::upsample_linear1d(x[0], {6}, false),
          at::upsample_nearest2d(x[1], {6, 8}), at::upsample_bilinear2d(x[1], {6, 8}, false),
          at::upsample_bilinear2d(x[2], {6, 8}, true), at::upsample_bicubic2d(x[1], {5, 5}, false),
          at::upsample_nearest2d(x[2], {6, 8}), at::upsample_nearest3d(x[3], {6, 6, 6}),
          at::upsample_trilinear3d(x[3], {6, 6, 6}, false),
          F::interpolate(
              x[1],
              F::InterpolateFuncOptions().scale_factor(std::vector<double>{2, 2}).mode(torch::kNearest))));
  table.add("grid_sample",
            IN(randn({1, 2, 4, 4}), randn({1, 3, 5, 2}), randn({1, 2, 4, 4, 4}), randn({1, 3, 3, 3, 3})),
            OUT(at::grid_sampler(x[0], x[1], 0, 0, false), at::grid_sampler(x[2], x[3], 0, 0, false),
                at::affine_grid_generator(x[0].slice(1, 0, 1).slice(2, 0, 2).slice(3, 0, 3).squeeze(1),
                                          {1, 2, 3, 3}, false)));
  table.add("losses", IN(randn({4, 5}), randn({4, 5}), longs({4}, 5), randn({5}).abs(), randn({5, 4}).t()),
            [](Tensors& x) {
              Tensors out;
              for (const std::int64_t reduction : {0, 1, 2})
                for (const at::Tensor& y :
                     {at::mse_loss(x[0], x[1], reduction), at::l1_loss(x[0], x[1], reduction),
                      at::smooth_l1_loss(x[0], x[4], reduction), at::huber_loss(x[4], x[1], reduction),
                      at::binary_cross_entropy(x[0].sigmoid(), x[1].sigmoid().detach(), {}, reduction),
                      at::binary_cross_entropy_with_logits(x[0], x[1].sigmoid(), {}, {}, reduction),
                      at::nll_loss(x[0].log_softmax(1), x[2], {}, reduction),
                      at::cross_entropy_loss(x[0], x[2], x[3].detach(), reduction),
                      at::kl_div(x[0].log_softmax(1), x[1].softmax(1), reduction),
                      at::soft_margin_loss(x[0], x[1].sign().detach(), reduction),
                      at::multi_margin_loss(x[0], x[2], 1, 1, {}, reduction),
                      at::hinge_embedding_loss(x[0], x[1].sign(), 1, reduction),
                      at::margin_ranking_loss(x[0], x[1], x[1].sign(), 0, reduction),
                      at::poisson_nll_loss(x[0], x[1].abs(), true, false, 1e-8, reduction),
                      at::triplet_margin_loss(x[0], x[1], x[4], 1, 2, 1e-6, false, reduction),
                      at::mse_loss(x[4], x[1], reduction),
                      at::cosine_embedding_loss(x[0], x[1], x[2].sign(), 0, reduction)})
                  out.push_back(y);
              return out;
            });
  // The mean of smoothed labels selects by a mask, so it cannot run in shape only.
  table.add("label_smoothing", IN(randn({4, 5}), longs({4}, 5), randn({5, 4}).t()),
            OUT(at::cross_entropy_loss(x[0], x[1], {}, at::Reduction::Sum, -100, 0.1),
                at::cross_entropy_loss(x[2], x[1], {}, at::Reduction::None, -100, 0.1)));
  table.add("losses_of_images",
            IN(randn({2, 5, 3, 3}), longs({2, 3, 3}, 5), randn({2, 5, 6}), longs({2, 6}, 5)),
            OUT(at::nll_loss2d(x[0].log_softmax(1), x[1]), at::cross_entropy_loss(x[0], x[1], {}, 0),
                at::cross_entropy_loss(x[2], x[3])));
  table.add("ctc_loss", IN(randn({6, 2, 5}), longs({2, 3}, 4) + 1), [](Tensors& x) {
    const std::vector<std::int64_t> lengths = {6, 5}, targets = {3, 2};
    return Tensors{at::ctc_loss(x[0].log_softmax(2), x[1], lengths, targets, 0, at::Reduction::Sum)};
  });
  table.add("multilabel", IN(randn({3, 4}), longs({3, 4}, 4)),
            OUT(at::multilabel_margin_loss(x[0], x[1]),
                F::multilabel_soft_margin_loss(x[0], (x[1] > 1).to(kFloat))));
  table.add("attention_by_hand", IN(randn({2, 4, 5, 8}), randn({2, 5, 4, 8}).transpose(1, 2)),
            OUT(at::matmul((at::matmul(x[0], x[1].transpose(-2, -1)) / 2.8)
                               .masked_fill(torch::ones({5, 5}, kBool).triu(1), -1e9)
                               .softmax(-1),
                           x[1])
                    .transpose(1, 2)
                    .reshape({2, 5, 32})));
  table.add("rnn_cells",
            IN(randn({2, 4}), randn({2, 3}), randn({12, 4}), randn({12, 3}), randn({9, 4}), randn({9, 3}),
               randn({3, 4}), randn({3, 3})),
            [](Tensors& x) {
              Tensors out = listed(at::lstm_cell(x[0], {x[1], x[1]}, x[2], x[3]));
              out.push_back(at::gru_cell(x[0], x[1], x[4], x[5]));
              out.push_back(at::rnn_tanh_cell(x[0], x[1], x[6], x[7]));
              return out;
            });
  table.add("weight_norm", IN(randn({4, 3}), randn({4, 1})), OUT(at::_weight_norm(x[0], x[1], 0)));
  table.add("softmax_types", IN(randn({3, 4}).to(kBFloat16), cube()),
            OUT(x[0].softmax(1), x[0].log_softmax(1, kFloat), x[1].softmax(0), x[1].log_softmax(-1)));
}

void add_lists(Table& table) {
  struct Foreach {
    const char* name;
    const char* overload;
    int lists;  // how many lists of tensors it takes
    std::vector<c10::IValue> rest;
  };
  static const std::vector<Foreach> all = {{"_foreach_add", "Scalar", 1, {2.0}},
                                           {"_foreach_add", "List", 2, {1}},
                                           {"_foreach_mul", "Scalar", 1, {0.5}},
                                           {"_foreach_mul", "List", 2, {}},
                                           {"_foreach_div", "List", 2, {}},
                                           {"_foreach_sub", "List", 2, {1}},
                                           {"_foreach_sqrt", "", 1, {}},
                                           {"_foreach_neg", "", 1, {}},
                                           {"_foreach_addcmul", "Scalar", 3, {0.5}},
                                           {"_foreach_addcdiv", "Scalar", 3, {0.5}},
                                           {"_foreach_maximum", "List", 2, {}},
                                           {"_foreach_exp", "", 1, {}},
                                           {"_foreach_abs", "", 1, {}},
                                           {"_foreach_reciprocal", "", 1, {}}};
  for (const Foreach& each : all)
    for (const bool in_place : {false, true}) {
      const std::string name = std::string(each.name) + (in_place ? "_" : "");
      if (!has_operator("aten::" + name, each.overload)) continue;
      table.plain("list" + name + each.overload,
                  IN(positive({2, 3}), positive({3, 2}).t(), positive({2, 3}), positive({2, 3}),
                     positive({3, 2}).t(), positive({2, 3})),
                  [each, name, in_place](Tensors& x) {
                    std::vector<c10::IValue> arguments;
                    for (int i = 0; i < each.lists; ++i)
                      arguments.emplace_back(c10::List<at::Tensor>(
                          {x[static_cast<std::size_t>(2 * i)], x[static_cast<std::size_t>(2 * i + 1)]}));
                    arguments.insert(arguments.end(), each.rest.begin(), each.rest.end());
                    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + name).c_str(),
                                                                                   each.overload);
                    op.callBoxed(&arguments);
                    return in_place ? Tensors{x[0], x[1]} : arguments.back().toTensorVector();
                  });
    }
}

// Operators of newer versions only.
void add_newer(Table& table) {
  const auto named = [&](const std::string& test, const std::string& op, auto inputs,
                         std::function<std::vector<c10::IValue>(Tensors&)> arguments) {
    if (!has_operator("aten::" + op, "")) return;
    table.add(test, inputs,
              [op, arguments](Tensors& x) { return Tensors{call_by_name("aten::" + op, "", arguments(x))}; });
  };
  const c10::IValue none;
  const auto attend = [none](bool causal, double dropout) {
    return [=](Tensors& x) {
      return std::vector<c10::IValue>{x[0], x[1], x[2], none, dropout, causal, none, false};
    };
  };
  const auto heads = IN(randn({2, 4, 5, 8}), randn({2, 4, 6, 8}), randn({2, 4, 6, 8}));
  const auto heads_inside = IN(randn({2, 5, 4, 8}).transpose(1, 2), randn({2, 5, 4, 8}).transpose(1, 2),
                               randn({2, 5, 4, 8}).transpose(1, 2));
  named("sdpa", "scaled_dot_product_attention", heads, attend(false, 0));
  named("sdpa_causal", "scaled_dot_product_attention", heads_inside, attend(true, 0));
  named("sdpa_dropout", "scaled_dot_product_attention", heads, attend(false, 0.2));
  named("sdpa_mask", "scaled_dot_product_attention",
        IN(randn({2, 4, 5, 8}), randn({2, 4, 6, 8}), randn({2, 4, 6, 8}), randn({5, 6})), [none](Tensors& x) {
          return std::vector<c10::IValue>{x[0], x[1], x[2], x[3].detach(), 0.0, false, none, false};
        });
  named("sdpa_bfloat16", "scaled_dot_product_attention",
        IN(randn({2, 4, 5, 8}).to(kBFloat16), randn({2, 4, 5, 8}).to(kBFloat16),
           randn({2, 4, 5, 8}).to(kBFloat16)),
        attend(true, 0));
  named("rms_norm", "rms_norm", IN(randn({3, 4, 8}), randn({8})), [none](Tensors& x) {
    return std::vector<c10::IValue>{x[0], c10::List<std::int64_t>({8}), x[1], none};
  });
  if (has_operator("aten::_scaled_dot_product_attention", ""))
    table.add("sdpa_of_old", heads, [none](Tensors& x) {
      Tensors out;
      std::vector<c10::IValue> stack = {x[0], x[1], x[2], none, 0.0, true, false};
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("aten::_scaled_dot_product_attention", "")
          .callBoxed(&stack);
      for (const c10::IValue& value : stack) out.push_back(value.toTensor());
      return out;
    });
}

#undef IN
#undef OUT

}  // namespace

const std::vector<OperatorCall>& operator_calls() {
  static const std::vector<OperatorCall> calls = [] {
    Table table;
    add_unary(table);
    add_activations(table);
    add_binary(table);
    add_reductions(table);
    add_matrices(table);
    add_shapes(table);
    add_indexing(table);
    add_networks(table);
    add_lists(table);
    add_newer(table);
    return table.calls;
  }();
  return calls;
}

bool has_operator(const std::string& name, const std::string& overload) {
  return c10::Dispatcher::singleton().findSchema({name, overload}).has_value();
}

at::Tensor call_by_name(const std::string& name, const std::string& overload,
                        std::vector<c10::IValue> arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  op.callBoxed(&arguments);
  return arguments.back().toTensor();
}

}  // namespace penstock::zoo
