// Every elementwise operator, called by name, against one process.
#include <gtest/gtest.h>

#include "tests/dtensor/operator_call.h"
#include "tests/dtensor/rule_checker.h"

namespace penstock::test {
namespace rules_pointwise_test {

TEST(PointwiseByName, OneTensor) {
  check_rules({
      each_of("of numbers of both signs", {sample({5, 3})},
              {{"abs"},
               {"angle"},
               {"asinh"},
               {"atan"},
               {"ceil"},
               {"cos"},
               {"cosh"},
               {"erf"},
               {"erfc"},
               {"exp"},
               {"exp2"},
               {"expm1"},
               {"floor"},
               {"frac"},
               {"hardsigmoid"},
               {"hardswish"},
               {"isinf"},
               {"isnan"},
               {"isneginf"},
               {"isposinf"},
               {"isfinite"},
               {"logical_not"},
               {"mish"},
               {"nan_to_num"},
               {"reciprocal"},
               {"relu"},
               {"relu6"},
               {"round"},
               {"selu"},
               {"sgn"},
               {"sigmoid"},
               {"sign"},
               {"signbit"},
               {"silu"},
               {"sin"},
               {"sinc"},
               {"sinh"},
               {"square"},
               {"tan"},
               {"tanh"},
               {"trunc"},
               {"special_erfcx"},
               {"gelu"},
               {"elu"},
               {"celu"},
               {"hardshrink"},
               {"hardtanh"},
               {"leaky_relu"},
               {"log_sigmoid_forward"},
               {"softplus"},
               {"softshrink"},
               {"neg"},
               {"positive"},
               {"clamp", {{"min", -0.5}, {"max", 1.0}}},
               {"clamp_max", {{"max", 0.5}}},
               {"clamp_min", {{"min", -0.5}}},
               {"threshold", {{"threshold", 0.25}, {"value", 3.0}}},
               {"add.Scalar", {{"other", 2}}},
               {"sub.Scalar", {{"other", 2}}},
               {"rsub.Scalar", {{"other", 2}}},
               {"mul.Scalar", {{"other", 3}}},
               {"div.Scalar", {{"other", 4}}},
               {"pow.Tensor_Scalar", {{"exponent", 3}}}}),
      each_of("of positive numbers below one", {sample_positive({5, 3}).sigmoid()},
              {{"acos"},
               {"asin"},
               {"atanh"},
               {"digamma"},
               {"erfinv"},
               {"lgamma"},
               {"log"},
               {"log10"},
               {"log1p"},
               {"log2"},
               {"logit"},
               {"rsqrt"},
               {"sqrt"},
               {"special_entr"},
               {"special_expit"},
               {"special_log1p"},
               {"polygamma", {{"n", 1}}}}),
      each_of("of numbers above one", {sample_positive({5, 3}) + 1}, {{"acosh"}}),
  });
}

TEST(PointwiseByName, Copies) {
  check_rules({
      each_of("copies", {sample({5, 3})},
              {{"clone"},
               {"detach"},
               {"alias"},
               {"lift"},
               {"lift_fresh"},
               {"lift_fresh_copy"},
               {"alias_copy"},
               {"detach_copy"},
               {"_to_copy"},
               {"_to_copy", {{"dtype", at::kDouble}}},
               {"contiguous"},
               {"_conj_physical"},
               {"conj_physical"},
               {"resolve_conj"},
               {"fill.Scalar", {{"value", 2}}},
               {"zero"}}),
      each_of("of two", {sample({5, 3}), sample({5, 3}, 1)}, {{"copy"}}),
      {.name = "in place",
       .inputs = {sample({5, 3}), sample({5, 3}, 1)},
       .body =
           [](const Tensors& in) {
             Tensors out{at::empty_like(in[0]), in[0].clone(), in[1].clone(), at::empty_like(in[0])};
             out[0].copy_(in[1]), out[1].fill_(0.25), out[2].zero_();
             call_operator("aten::copy.out", {in[0], in[1], out[3]});
             return out;
           },
       .backward = false,
       .may_refuse = true},
  });
}

TEST(PointwiseByName, ComplexNumbers) {
  check_rules({
      {.name = "conjugates",
       .inputs = {sample({4, 3}), sample({4, 3}, 1)},
       .body =
           [](const Tensors& in) {
             const at::Tensor z = at::view_as_complex(at::stack({in[0], in[1]}, -1));
             return Tensors{at::view_as_real(at::_conj(z).resolve_conj()),
                            at::view_as_real(at::conj_physical(z)), at::view_as_real(z * at::_conj(z)),
                            z.abs(), z.angle()};
           },
       .backward = false,
       .partial = false,
       .most = 14},
  });
}

TEST(PointwiseByName, TwoTensors) {
  check_rules({
      each_of("comparisons and arithmetic", {sample({5, 3}), sample({5, 3}, 1)},
              {{"add.Tensor"},
               {"sub.Tensor"},
               {"rsub.Tensor"},
               {"mul.Tensor"},
               {"div.Tensor"},
               {"div.Tensor_mode", {{"rounding_mode", "floor"}}},
               {"atan2"},
               {"copysign.Tensor"},
               {"eq.Tensor"},
               {"floor_divide"},
               {"fmax"},
               {"fmin"},
               {"fmod.Tensor"},
               {"ge.Tensor"},
               {"gt.Tensor"},
               {"heaviside"},
               {"hypot"},
               {"le.Tensor"},
               {"logaddexp"},
               {"logaddexp2"},
               {"logical_and"},
               {"logical_or"},
               {"logical_xor"},
               {"lt.Tensor"},
               {"maximum"},
               {"minimum"},
               {"ne.Tensor"},
               {"nextafter"},
               {"remainder.Tensor"},
               {"lerp.Scalar", {{"weight", 0.25}}},
               {"float_power.Tensor_Tensor"},
               {"true_divide.Tensor"}},
              16),
      each_of("of positive numbers", {sample_positive({5, 3}), sample_positive({3}, 1)},
              {{"pow.Tensor_Tensor"}, {"xlogy.Tensor"}, {"_prelu_kernel"}}, 16),
      each_of("of integers", {sample_index({5, 3}, 6) + 1, sample_index({5, 3}, 5, 1)},
              {{"bitwise_and.Tensor"},
               {"bitwise_or.Tensor"},
               {"bitwise_xor.Tensor"},
               {"bitwise_left_shift.Tensor"},
               {"bitwise_right_shift.Tensor"},
               {"__and__.Tensor"},
               {"__or__.Tensor"},
               {"__xor__.Tensor"},
               {"__lshift__.Tensor"},
               {"__rshift__.Tensor"},
               {"gcd"}},
              14),
      each_of("of one integer", {sample_index({5, 3}, 6)}, {{"bitwise_not"}}),
      {.name = "masked_fill",
       .inputs = {sample({5, 3}), sample({5, 3}, 1)},
       .body = [](const Tensors& in) { return Tensors{in[0].masked_fill(in[1] > 0, 3)}; },
       .backward = false,
       .most = 16},
  });
}

TEST(PointwiseByName, ThreeTensors) {
  check_rules({
      each_of("weighted sums", {sample({4, 3}), sample({4, 3}, 1), sample_positive({4, 3}, 2)},
              {{"addcmul"}, {"addcdiv"}, {"lerp.Tensor"}}, 16),
      {.name = "where",
       .inputs = {sample({4, 3}), sample({4, 3}, 1), sample({3}, 2)},
       .body = [](const Tensors& in) { return Tensors{at::where(in[0] > 0, in[1], in[2])}; },
       .backward = false,
       .most = 16},
  });
}

// The second tensor is the input, or the result, depending on the operator's arguments.
TEST(PointwiseByName, Gradients) {
  check_rules({
      each_of("of two", {sample({5, 3}), sample({5, 3}, 1).sigmoid()},
              {{"elu_backward", {{"alpha", 1.0}, {"scale", 1.0}, {"input_scale", 1.0}, {"is_result", false}}},
               {"gelu_backward"},
               {"hardshrink_backward", {{"lambd", 0.5}}},
               {"hardsigmoid_backward"},
               {"hardswish_backward"},
               {"hardtanh_backward", {{"min_val", -1.0}, {"max_val", 0.75}}},
               {"leaky_relu_backward", {{"negative_slope", 0.1}, {"self_is_result", false}}},
               {"logit_backward"},
               {"mish_backward"},
               {"sigmoid_backward"},
               {"silu_backward"},
               {"softplus_backward", {{"beta", 1.0}, {"threshold", 20.0}}},
               {"softshrink_backward", {{"lambd", 0.5}}},
               {"tanh_backward"},
               {"threshold_backward", {{"threshold", 0.75}}}},
              16),
      each_of("of three", {sample({4, 3}), sample({4, 3}, 1), sample_positive({4, 3}, 2)},
              {{"log_sigmoid_backward"},
               {"rrelu_with_noise_backward",
                {{"lower", 0.1}, {"upper", 0.3}, {"training", true}, {"self_is_result", false}}},
               {"_prelu_kernel_backward"}},
              16),
  });
  // The mask of the CUDA dropout kernel has bytes.
  stand_in("aten::_masked_scale", [](const c10::OperatorHandle& op, Stack* stack) {
    give(op, stack,
         {stacked(op, *stack, "self").toTensor() * stacked(op, *stack, "mask").toTensor() *
          stacked(op, *stack, "scale").toDouble()});
  });
  check_rules({
      {.name = "of dropout",
       .inputs = {sample({4, 3}), sample_index({4, 3}, 2, 1)},
       .body =
           [](const Tensors& in) {
             Tensors out = call_operator("aten::native_dropout_backward", {in[0], in[1].to(at::kBool)},
                                         {{"scale", 2.0}});
             if (has_operator("aten::_masked_scale"))
               out.push_back(
                   call_operator("aten::_masked_scale", {in[0], in[1].to(at::kByte)}, {{"scale", 2.0}})[0]);
             return out;
           },
       .backward = false,
       .most = 16},
  });
}

// The two halves of a dim are combined: a rank's part must contain both.
TEST(PointwiseByName, HalvesOfADim) {
  std::vector<RuleCase> cases;
  for (const std::int64_t dim : {0, 1})
    cases.push_back(
        {.name = "glu_jvp of dim " + std::to_string(dim),
         .inputs = {sample({4, 6}), sample({4, 6}, 1)},
         .body =
             [dim](const Tensors& in) {
               return call_operator("aten::glu_jvp", {at::glu(in[0], dim), in[0], in[1]}, {{"dim", dim}});
             },
         .backward = false,
         .most = 16});
  check_rules(cases);
}

}  // namespace rules_pointwise_test
}  // namespace penstock::test
