// Rules of fused kernels that not every LibTorch and not every device has, compared with one process. If the
// CPU has no kernel, a simple implementation replaces it: what distributed tensors do around the kernel is
// the same.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "penstock/fake.h"
#include "tests/dtensor/operator_call.h"
#include "tests/dtensor/rule_checker.h"

namespace penstock::test {
namespace rules_vendor_test {

at::Tensor tensor_of(const c10::IValue& value) { return value.isTensor() ? value.toTensor() : at::Tensor(); }

// ---- batch normalization ----

void cudnn_batch_norm(const c10::OperatorHandle& op, Stack* stack) {
  const auto get = [&](const char* name) { return tensor_of(stacked(op, *stack, name)); };
  const auto [result, mean, inverse] = at::native_batch_norm(
      get("input"), get("weight"), get("bias"), get("running_mean"), get("running_var"),
      stacked(op, *stack, "training").toBool(), stacked(op, *stack, "exponential_average_factor").toDouble(),
      stacked(op, *stack, "epsilon").toDouble());
  give(op, stack, {result, mean, inverse, at::empty({0}, at::kByte)});
}

void cudnn_batch_norm_backward(const c10::OperatorHandle& op, Stack* stack) {
  const auto get = [&](const char* name) { return tensor_of(stacked(op, *stack, name)); };
  const auto [input, weight, bias] = at::native_batch_norm_backward(
      get("grad_output"), get("input"), get("weight"), get("running_mean"), get("running_var"),
      get("save_mean"), get("save_var"), true, stacked(op, *stack, "epsilon").toDouble(), {true, true, true});
  give(op, stack, {input, weight, bias});
}

// The result, and the statistics that were written.
RuleCase batch_norm_case(const std::string& name, std::map<std::string, c10::IValue> named, bool statistics) {
  RuleCase rule_case{.name = name + (statistics ? " with statistics" : ""),
                     .inputs = {sample({5, 3, 2}), sample({3}, 1), sample({3}, 2)},
                     .body =
                         [=](const Tensors& in) {
                           auto given = named;
                           given["weight"] = in[1], given["bias"] = in[2];
                           Tensors out{at::Tensor()};
                           if (statistics) {
                             out.push_back(in[3].detach().clone()), out.push_back(in[4].detach().clone());
                             given["running_mean"] = out[1], given["running_var"] = out[2];
                           } else {
                             given["running_mean"] = c10::IValue(), given["running_var"] = c10::IValue();
                           }
                           out[0] = call_operator("aten::" + name, {in[0]}, given)[0];
                           return out;
                         },
                     .may_refuse = statistics,
                     .rtol = 1e-4,
                     .atol = 1e-5,
                     .most = statistics ? 24u : 10u};
  if (statistics)
    rule_case.inputs.push_back(sample({3}, 3)), rule_case.inputs.push_back(sample_positive({3}, 4));
  return rule_case;
}

TEST(VendorRules, BatchNorm) {
  stand_in("aten::cudnn_batch_norm", cudnn_batch_norm);
  stand_in("aten::cudnn_batch_norm_backward", cudnn_batch_norm_backward);
  check_rules({
      batch_norm_case("cudnn_batch_norm",
                      {{"training", true}, {"exponential_average_factor", 0.25}, {"epsilon", 1e-5}}, false),
      batch_norm_case("cudnn_batch_norm",
                      {{"training", true}, {"exponential_average_factor", 0.25}, {"epsilon", 1e-5}}, true),
      batch_norm_case("cudnn_batch_norm",
                      {{"training", false}, {"exponential_average_factor", 0.25}, {"epsilon", 1e-5}}, true),
  });
  if (has_operator("aten::_native_batch_norm_legit"))
    check_rules({
        batch_norm_case("_native_batch_norm_legit", {{"training", true}, {"momentum", 0.25}, {"eps", 1e-5}},
                        true),
        batch_norm_case("_native_batch_norm_legit", {{"training", false}, {"momentum", 0.25}, {"eps", 1e-5}},
                        true),
    });
  if (has_operator("aten::_batch_norm_with_update"))
    check_rule(batch_norm_case("_batch_norm_with_update", {{"momentum", 0.25}, {"eps", 1e-5}}, true));
}

// ---- root mean square ----

// The dims that it is computed over.
std::vector<std::int64_t> last_dims(const c10::OperatorHandle& op, const Stack& stack) {
  std::vector<std::int64_t> dims;
  for (std::int64_t dim =
           -static_cast<std::int64_t>(stacked(op, stack, "normalized_shape").toListRef().size());
       dim < 0; ++dim)
    dims.push_back(dim);
  return dims;
}

void rms_norm(const c10::OperatorHandle& op, Stack* stack) {
  const at::Tensor input = tensor_of(stacked(op, *stack, "input")),
                   weight = tensor_of(stacked(op, *stack, "weight"));
  const c10::IValue eps = stacked(op, *stack, "eps");
  const at::Tensor inverse =
      input.square()
          .mean(last_dims(op, *stack), true)
          .add_(eps.isDouble() ? eps.toDouble() : std::numeric_limits<float>::epsilon())
          .rsqrt_();
  const at::Tensor normal = input * inverse;
  give(op, stack, {weight.defined() ? normal * weight : normal, inverse});
}

void rms_norm_backward(const c10::OperatorHandle& op, Stack* stack) {
  const auto get = [&](const char* name) { return tensor_of(stacked(op, *stack, name)); };
  const at::Tensor gradient = get("grad_out"), weight = get("weight"), inverse = get("rstd"),
                   normal = get("input") * inverse;
  const at::Tensor to_normal = weight.defined() ? gradient * weight : gradient;
  const auto mask = stacked(op, *stack, "output_mask").toBoolList();
  at::Tensor to_input, to_weight;
  if (mask[0])
    to_input = (to_normal - normal * (to_normal * normal).mean(last_dims(op, *stack), true)) * inverse;
  if (mask[1] && weight.defined()) to_weight = (gradient * normal).sum_to_size(weight.sizes());
  give(op, stack, {to_input, to_weight});
}

TEST(VendorRules, RootMeanSquare) {
  if (!has_operator("aten::_fused_rms_norm")) GTEST_SKIP() << "this LibTorch has no _fused_rms_norm";
  stand_in("aten::_fused_rms_norm", rms_norm);
  stand_in("aten::_fused_rms_norm_backward", rms_norm_backward);
  check_rules({
      {.name = "_fused_rms_norm",
       .inputs = {sample({5, 3, 4}), sample({4}, 1)},
       .body =
           [](const Tensors& in) {
             return Tensors{call_operator(
                 "aten::_fused_rms_norm", {in[0]},
                 {{"normalized_shape", std::vector<std::int64_t>{4}}, {"weight", in[1]}, {"eps", 1e-5}})[0]};
           },
       .rtol = 1e-4,
       .atol = 1e-5,
       .most = 16},
  });
}

// ---- attention ----

struct Scores {
  Scores(const c10::OperatorHandle& op, const Stack& stack) {
    const auto get = [&](const char* name) { return tensor_of(stacked(op, stack, name)); };
    query = get("query"), key = get("key"), value = get("value");
    const c10::IValue given = stacked(op, stack, "scale");
    scale = given.isDouble() ? given.toDouble() : 1 / std::sqrt(static_cast<double>(query.size(-1)));
    values = query.matmul(key.transpose(-2, -1)) * scale;
    if (const at::Tensor bias = get("attn_bias"); bias.defined()) values = values + bias;
    if (stacked(op, stack, "is_causal").toBool())
      values = values.masked_fill(at::ones({query.size(2), key.size(2)}, at::kBool).tril().logical_not(),
                                  -std::numeric_limits<double>::infinity());
  }
  at::Tensor query, key, value, values;
  double scale = 1;
};

// The results have the shapes that the kernels return, as determined by a fake run.
void attention(const c10::OperatorHandle& op, Stack* stack) {
  const std::size_t count = op.schema().arguments().size();
  Stack forms;
  for (std::size_t i = stack->size() - count; i < stack->size(); ++i)
    forms.push_back(map_tensors((*stack)[i], [](const at::Tensor& tensor) { return to_fake(tensor); }));
  op.callBoxed(&forms);
  const Scores scores(op, *stack);
  const std::vector<at::Tensor> computed{scores.values.softmax(-1).matmul(scores.value),
                                         scores.values.logsumexp(-1)};
  std::vector<c10::IValue> results;
  for (std::size_t i = 0; i < forms.size(); ++i) {
    if (!forms[i].isTensor() || !forms[i].toTensor().defined()) {
      results.push_back(forms[i]);
      continue;
    }
    const at::Tensor form = forms[i].toTensor();
    at::Tensor result = at::zeros(form.sizes(), at::TensorOptions(form.scalar_type()));
    if (i < 2 && result.numel() > 0) {
      // Some kernels return more rows than there are queries, or one more dim.
      at::Tensor place = result.narrow(2, 0, computed[i].size(2));
      place.copy_(computed[i].reshape(place.sizes()));
    }
    results.emplace_back(result);
  }
  give(op, stack, std::move(results));
}

void attention_backward(const c10::OperatorHandle& op, Stack* stack) {
  const auto get = [&](const char* name) { return tensor_of(stacked(op, *stack, name)); };
  const Scores scores(op, *stack);
  const at::Tensor gradient = get("grad_out").defined() ? get("grad_out") : get("grad_out_");
  const std::int64_t length = scores.query.size(2);
  const at::Tensor logsumexp =
      get("logsumexp").narrow(2, 0, length).reshape({scores.query.size(0), scores.query.size(1), length, 1});
  const at::Tensor weights = (scores.values - logsumexp).exp();
  const at::Tensor to_weights = gradient.matmul(scores.value.transpose(-2, -1));
  const at::Tensor to_scores = weights * (to_weights - (gradient * get("out")).sum(-1, true));
  std::vector<c10::IValue> results{to_scores.matmul(scores.key) * scores.scale,
                                   to_scores.transpose(-2, -1).matmul(scores.query) * scores.scale,
                                   weights.transpose(-2, -1).matmul(gradient)};
  if (op.schema().returns().size() == 4) {
    const bool asked = stacked(op, *stack, "grad_input_mask").toBoolList()[3] && get("attn_bias").defined();
    results.emplace_back(asked ? to_scores.sum_to_size(get("attn_bias").sizes()) : at::Tensor());
  }
  give(op, stack, std::move(results));
}

TEST(VendorRules, Attention) {
  const Tensors inputs{sample({3, 4, 3, 8}), sample({3, 4, 5, 8}, 1), sample({3, 4, 5, 8}, 2)};
  const Tensors square{sample({3, 4, 4, 8}), sample({3, 4, 4, 8}, 1), sample({3, 4, 4, 8}, 2)};
  struct Kernel {
    std::string name;
    std::map<std::string, c10::IValue> named;
  };
  std::size_t found = 0;
  for (const Kernel& kernel :
       std::vector<Kernel>{{"aten::_scaled_dot_product_flash_attention_for_cpu", {}},
                           {"aten::_scaled_dot_product_flash_attention", {}},
                           {"aten::_scaled_dot_product_cudnn_attention",
                            {{"attn_bias", c10::IValue()}, {"compute_log_sumexp", true}}},
                           {"aten::_scaled_dot_product_efficient_attention",
                            {{"attn_bias", c10::IValue()}, {"compute_log_sumexp", true}}}}) {
    if (!has_operator(kernel.name)) continue;
    ++found;
    stand_in(kernel.name, attention);
    stand_in(kernel.name + "_backward", attention_backward);
    for (const bool causal : {false, true}) {
      auto named = kernel.named;
      named["is_causal"] = causal;
      check_rule({.name = kernel.name,
                  .inputs = causal ? square : inputs,
                  .body =
                      [&](const Tensors& in) {
                        return Tensors{call_operator(kernel.name, {in[0], in[1], in[2]}, named)[0]};
                      },
                  .rtol = 1e-4,
                  .atol = 1e-5,
                  .most = 8});
    }
  }
  if (found == 0) GTEST_SKIP() << "this LibTorch has none of these kernels";
}

// The gradient of a bias that is broadcast over the batch is a sum over it.
TEST(VendorRules, AttentionWithABias) {
  const std::string name = "aten::_scaled_dot_product_efficient_attention";
  if (!has_operator(name)) GTEST_SKIP() << "this LibTorch has no " << name;
  stand_in(name, attention);
  stand_in(name + "_backward", attention_backward);
  for (const std::vector<std::int64_t>& shape :
       {std::vector<std::int64_t>{3, 4, 3, 5}, {1, 4, 3, 5}, {3, 1, 3, 5}})
    check_rule(
        {.name = name + " with a bias",
         .inputs = {sample({3, 4, 3, 8}), sample({3, 4, 5, 8}, 1), sample({3, 4, 5, 8}, 2), sample(shape, 3)},
         .body =
             [&](const Tensors& in) {
               return Tensors{call_operator(name, {in[0], in[1], in[2]},
                                            {{"attn_bias", in[3]}, {"compute_log_sumexp", true}})[0]};
             },
         .rtol = 1e-4,
         .atol = 1e-5,
         .most = 8});
}

// ---- optimizer steps ----

c10::IValue list_of(const Tensors& tensors) { return c10::IValue(c10::List<at::Tensor>(tensors)); }

// Adam, or AdamW, as the kernels compute it; without amsgrad.
void fused_adam(const c10::OperatorHandle& op, Stack* stack) {
  const auto list = [&](const char* name) { return stacked(op, *stack, name).toTensorVector(); };
  const auto number = [&](const char* name) { return stacked(op, *stack, name).toDouble(); };
  const Tensors parameters = list("self"), gradients = list("grads"), means = list("exp_avgs"),
                squares = list("exp_avg_sqs"), steps = list("state_steps");
  const double lr = number("lr"), beta1 = number("beta1"), beta2 = number("beta2"),
               decay = number("weight_decay"), eps = number("eps");
  const bool decoupled = op.operator_name().name == "aten::_fused_adamw_";
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor gradient = stacked(op, *stack, "maximize").toBool() ? gradients[i].neg() : gradients[i];
    if (decoupled)
      parameters[i].mul_(1 - lr * decay);
    else
      gradient = gradient + parameters[i] * decay;
    means[i].lerp_(gradient, 1 - beta1);
    squares[i].mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
    const double step = steps[i].item<double>();
    const at::Tensor denominator = (squares[i].sqrt() / std::sqrt(1 - std::pow(beta2, step))).add_(eps);
    parameters[i].addcdiv_(means[i], denominator, -lr / (1 - std::pow(beta1, step)));
  }
  give(op, stack, {});
}

// In place and not, on parameters and gradients with different placements.
void check_step(const std::string& name, const std::vector<std::string>& states, bool counted,
                const std::map<std::string, c10::IValue>& numbers) {
  for (const bool in_place : {true, false}) {
    const std::string op = "aten::" + name + (in_place ? "_" : "");
    if (!has_operator(op)) continue;
    check_rule({.name = op,
                .inputs = {sample({5, 3}), sample({4}, 1), sample({5, 3}, 2), sample({4}, 3)},
                .body =
                    [&](const Tensors& in) {
                      const Tensors parameters{in[0].clone(), in[1].clone()},
                          gradients{in[2].clone(), in[3].clone()};
                      auto named = numbers;
                      named["self"] = list_of(parameters), named["grads"] = list_of(gradients);
                      Tensors out = parameters;
                      for (const std::string& state : states) {
                        const Tensors mine{at::zeros_like(parameters[0]), at::zeros_like(parameters[1])};
                        named[state] = list_of(mine);
                        out.insert(out.end(), mine.begin(), mine.end());
                      }
                      if (counted) named["state_steps"] = list_of({at::ones({}), at::ones({})});
                      const Tensors results = call_operator(op, {}, named);
                      if (in_place) return out;
                      return Tensors{
                          results[0], results[1], results[4],
                          results[5]};  // parameters and the first state, which follow the gradients
                    },
                .backward = false,
                .may_refuse = in_place,
                .rtol = 1e-4,
                .atol = 1e-5,
                .most = 20});
  }
}

TEST(VendorRules, OptimizerSteps) {
  stand_in("aten::_fused_adam_", fused_adam);
  stand_in("aten::_fused_adamw_", fused_adam);
  const c10::IValue none = list_of({});
  for (const char* adam : {"_fused_adam", "_fused_adamw"})
    check_step(adam, {"exp_avgs", "exp_avg_sqs"}, true,
               {{"max_exp_avg_sqs", none},
                {"lr", 0.1},
                {"beta1", 0.9},
                {"beta2", 0.99},
                {"weight_decay", 0.01},
                {"eps", 1e-8},
                {"amsgrad", false},
                {"maximize", false}});
  check_step("_fused_sgd", {"momentum_buffer_list"}, false,
             {{"weight_decay", 0.01},
              {"momentum", 0.9},
              {"lr", 0.1},
              {"dampening", 0.0},
              {"nesterov", false},
              {"maximize", false},
              {"is_first_step", false}});
  check_step("_fused_adagrad", {"state_sums"}, true,
             {{"lr", 0.1}, {"lr_decay", 0.0}, {"weight_decay", 0.01}, {"eps", 1e-8}, {"maximize", false}});
}

// ---- scaled gradients ----

void check_and_unscale(const c10::OperatorHandle& op, Stack* stack) {
  const at::Tensor found = stacked(op, *stack, "found_inf").toTensor(),
                   scale = stacked(op, *stack, "inv_scale").toTensor();
  for (const at::Tensor& gradient : stacked(op, *stack, "self").toTensorVector()) {
    if (!gradient.isfinite().all().item<bool>()) found.fill_(1);
    gradient.mul_(scale);
  }
  give(op, stack, {});
}

// An infinity on one rank is reported on all.
TEST(VendorRules, ScaledGradients) {
  const std::string name = "aten::_amp_foreach_non_finite_check_and_unscale_";
  ASSERT_TRUE(has_operator(name));
  stand_in(name, check_and_unscale);
  at::Tensor infinite = sample({4}, 1);
  infinite[3] = std::numeric_limits<float>::infinity();
  for (const bool finite : {true, false})
    check_rule({.name = name,
                .inputs = {sample({5, 3}), finite ? sample({4}, 1) : infinite},
                .body =
                    [&](const Tensors& in) {
                      const Tensors gradients{in[0].clone(), in[1].clone()};
                      const at::Tensor found = at::zeros({1});
                      call_operator(name, {found, at::full({1}, 0.5)}, {{"self", list_of(gradients)}});
                      EXPECT_EQ(found.item<float>() != 0, !finite);
                      return Tensors{gradients[0], gradients[1], found};
                    },
                .backward = false,
                .partial = finite,
                .may_refuse = true,
                .most = 24});
}

}  // namespace rules_vendor_test
}  // namespace penstock::test
