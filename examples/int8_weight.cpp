// A weight stored as int8, trained by unmodified code: torch::nn::Linear, autograd and torch::optim::SGD.
//
//   replace_data(linear->weight, Int8Weight::make(linear->weight));
//
// Int8Weight is a tensor subclass: it appears as a float tensor, but stores int8 values and one float scale
// per row, a quarter of the memory. Gradients and activations stay plain float tensors. The program trains a
// small network with float and with int8 weights and fails (exit code 1) if the second does not learn as well
// as the first.
#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "examples/failure.h"
#include "penstock/errors.h"
#include "penstock/tensor_subclass.h"

using namespace penstock;

class Int8Weight final : public Payload {
 public:
  static constexpr std::string_view kKind = "Int8Weight";

  // `scale` has size 1 in the dims that share a scale and the size of `data` in the others: (rows, 1), or (1,
  // rows) in a transposed view. The same view of both therefore yields a matching pair.
  Int8Weight(at::Tensor data, at::Tensor scale) : data(std::move(data)), scale(std::move(scale)) {}

  // From a float matrix (rows, columns).
  static at::Tensor make(const at::Tensor& weight) {
    const at::NoGradGuard no_grad;
    const Int8Weight made(torch::empty(weight.sizes(), torch::kInt8), torch::zeros({weight.size(0), 1}));
    made.store(weight.detach());
    return wrap(made.data, made.scale);
  }

  // The values of this weight as a plain float tensor.
  at::Tensor value() const { return data.to(torch::kFloat) * scale; }

  // Writes new values. A row's scale grows if they no longer fit and never shrinks, so that unchanged weights
  // keep their value. Rounding is stochastic: most optimizer steps are smaller than half a unit of int8 and
  // would always be lost by rounding to nearest; instead each step changes the weight with a proportional
  // probability.
  void store(const at::Tensor& numbers) const {
    std::vector<std::int64_t> shared;  // the dims that share one scale
    for (std::int64_t dim = 0; dim < scale.dim(); ++dim)
      if (scale.size(dim) == 1) shared.push_back(dim);
    const at::Tensor needed = numbers.abs().amax(shared, /*keepdim=*/true) / 127;
    scale.copy_(at::maximum(scale, needed).clamp_min(1e-12));
    const at::Tensor units = numbers / scale;
    data.copy_((units + torch::rand_like(units)).floor().clamp(-127, 127));
  }

  std::string_view kind() const override { return kKind; }

  void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
    const auto found = kWays.find(traits_of(op).name);
    if (found == kWays.end())
      refuse(op, "add it to kWays, or call value() of the payload and use the plain tensor");
    WrapperCall<Int8Weight> call(op, stack);
    switch (found->second) {
      case Way::Parts: {  // the same operator on both parts yields another Int8Weight
        const Stack datas = call.run([](const Int8Weight& weight) { return weight.data; });
        const Stack scales = call.run([](const Int8Weight& weight) { return weight.scale; });
        call.finish(datas, [&](const at::Tensor& data, ResultPlace place, const at::Tensor* viewed) {
          return wrap(data, tensor_at(scales, place), viewed);
        });
        return;
      }
      case Way::Read: {  // plain values in, plain results out
        const Stack results = call.run([](const Int8Weight& weight) { return weight.value(); });
        call.finish(results, [](const at::Tensor& plain, ResultPlace, const at::Tensor*) { return plain; });
        return;
      }
      case Way::Write: {  // dequantize, let the operator write the plain copy, requantize; the result is the
                          // argument itself
        const Stack results = call.run([](const Int8Weight& weight) { return weight.value(); });
        const at::Tensor self = call.arguments()[0].toTensor();
        const auto& weight = *payload_as<Int8Weight>(self);
        if (found->first == "aten::copy_") weight.scale.zero_();  // all values are new: fit the scale to them
        weight.store(results[0].toTensor());
        stack->push_back(self);
        return;
      }
    }
  }

  std::vector<std::pair<std::string, at::Tensor>> inner_tensors() const override {
    return {{"data", data}, {"scale", scale}};
  }
  static at::Tensor unflatten(const FlatWrapper& flat) {
    return wrap(flat.tensors.at(0).second, flat.tensors.at(1).second);
  }

  const at::Tensor data, scale;

 private:
  enum class Way { Parts, Read, Write };
  // With the overload name: "aten::mm" differs from "aten::mm.out", which writes.
  static inline const std::map<std::string_view, Way> kWays = {
      {"aten::t", Way::Parts},           {"aten::transpose.int", Way::Parts},
      {"aten::detach", Way::Parts},      {"aten::clone", Way::Parts},
      {"aten::mm", Way::Read},           {"aten::addmm", Way::Read},
      {"aten::add.Tensor", Way::Read},   {"aten::_to_copy", Way::Read},
      {"aten::empty_like", Way::Read},   {"aten::zeros_like", Way::Read},
      {"aten::add_.Tensor", Way::Write}, {"aten::mul_.Tensor", Way::Write},
      {"aten::mul_.Scalar", Way::Write}, {"aten::addcdiv_", Way::Write},
      {"aten::copy_", Way::Write},
  };

  static at::Tensor wrap(const at::Tensor& data, const at::Tensor& scale,
                         const at::Tensor* viewed = nullptr) {
    WrapperGeometry geometry = geometry_of(data);
    geometry.dtype = at::kFloat;  // what the outside sees
    return make_wrapper(c10::make_intrusive<Int8Weight>(data, scale), geometry, viewed);
  }
};

// ---- the network: only the two lines that replace the weights know how they are stored ----

struct Outcome {
  double first_loss = 0, last_loss = 0;
  std::size_t weight_bytes = 0;
};

Outcome train(bool int8) {
  torch::manual_seed(1);
  torch::nn::Linear in(32, 128), hidden(128, 128), out(128, 1);
  torch::nn::Sequential model(in, torch::nn::Tanh(), hidden, torch::nn::Tanh(), out);
  const torch::Tensor x = torch::randn({512, 32});
  const torch::Tensor target =
      (x.slice(1, 0, 8).sum(1, true) * 0.5).sin() + 0.5 * x.slice(1, 8, 9) * x.slice(1, 9, 10);

  if (int8)
    for (const torch::nn::Linear& linear : {in, hidden, out})
      replace_data(linear->weight, Int8Weight::make(linear->weight));

  torch::optim::SGD optimizer(model->parameters(),
                              torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(1e-4));
  Outcome outcome;
  for (int step = 0; step <= 400; ++step) {
    optimizer.zero_grad();
    const torch::Tensor loss = torch::mse_loss(model->forward(x), target);
    outcome.last_loss = loss.item<double>();
    if (step == 0) outcome.first_loss = outcome.last_loss;
    if (step % 100 == 0) fmt::print("  step {:3}  loss {:.4f}\n", step, outcome.last_loss);
    loss.backward();
    optimizer.step();
  }
  for (const torch::nn::Linear& linear : {in, hidden, out}) {
    const auto* weight = payload_as<Int8Weight>(linear->weight);
    outcome.weight_bytes += weight ? weight->data.nbytes() + weight->scale.nbytes() : linear->weight.nbytes();
    if (is_wrapper(linear->weight.grad()))
      throw StateError("the gradient of a weight should be a plain tensor");
  }
  return outcome;
}

bool check(bool good, std::string_view what) {
  fmt::print("{} {}\n", good ? "ok:    " : "FAILED:", what);
  return good;
}

int main() try {
  register_wrapper_kind(std::string(Int8Weight::kKind), &Int8Weight::unflatten);
  fmt::print("float weights\n");
  const Outcome plain = train(false);
  fmt::print("int8 weights\n");
  const Outcome int8 = train(true);
  fmt::print("weights: {} bytes in float, {} in int8 ({:.1f} %)\n", plain.weight_bytes, int8.weight_bytes,
             100.0 * static_cast<double>(int8.weight_bytes) / static_cast<double>(plain.weight_bytes));

  bool good = check(int8.last_loss < 0.1 * int8.first_loss, "the loss fell to a tenth with int8 weights");
  good &= check(int8.last_loss < plain.last_loss + 0.005 * plain.first_loss,
                "it ended where the float run did, within 0.5 % of the first loss");
  good &=
      check(int8.weight_bytes * 3 < plain.weight_bytes, "the weights take less than a third of the memory");

  // Flatten and unflatten, as a checkpoint does.
  const torch::Tensor weight = Int8Weight::make(torch::randn({4, 8}));
  const torch::Tensor again = unflatten_wrapper(flatten_wrapper(weight));
  good &= check(torch::equal(payload_as<Int8Weight>(again)->value(), payload_as<Int8Weight>(weight)->value()),
                "flatten and unflatten return the same weight");

  // Writes are visible through every view; a copy has its own scale.
  weight.t().copy_(torch::full({8, 4}, 0.01));
  good &= check(torch::allclose(payload_as<Int8Weight>(weight)->value(), torch::full({4, 8}, 0.01), 1e-2),
                "a copy into a view of the weight writes the weight");

  // An operator that the subclass does not handle is an error that names it, never a silent conversion.
  try {
    weight.exp();
    good &= check(false, "exp() on the weight is refused");
  } catch (const TypeError& error) {
    fmt::print("exp() is refused: {}\n", error.what());
  }
  return good ? 0 : 1;
} catch (...) {
  return failure("int8_weight");
}
