#include "penstock/models/wide_cross_entropy.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

namespace penstock::models {

namespace {

// Elements that are widened at once: 64 MB, large enough to fill a GPU.
constexpr std::int64_t kBlock = std::int64_t{1} << 24;

class WideCrossEntropy : public torch::autograd::Function<WideCrossEntropy> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& logits, const at::Tensor& targets, std::int64_t ignored) {
    const std::int64_t rows = logits.size(0);
    const std::int64_t step = std::max<std::int64_t>(1, kBlock / std::max<std::int64_t>(1, logits.size(1)));
    const at::Tensor gradient = at::empty_like(logits);
    const at::Tensor counts = targets.ne(ignored).unsqueeze(1);
    const at::Tensor wanted = targets.masked_fill(targets.eq(ignored), 0).unsqueeze(1);
    at::Tensor sum = at::zeros({}, logits.options().dtype(at::kFloat));
    for (std::int64_t begin = 0; begin < rows; begin += step) {
      const auto block = [&](const at::Tensor& all) { return all.narrow(0, begin, std::min(step, rows - begin)); };
      const at::Tensor part = block(logits), want = block(wanted), counted = block(counts);
      at::Tensor probabilities = at::softmax(part, 1, at::kFloat);
      // The largest one is at least 1 / vocabulary, so its logarithm is exact; others may be 0.
      const at::Tensor largest = part.argmax(1, true);
      const at::Tensor normalizer = part.gather(1, largest).to(at::kFloat) - probabilities.gather(1, largest).log();
      const at::Tensor own = part.gather(1, want).to(at::kFloat);
      sum += ((normalizer - own) * counted).sum();
      probabilities.scatter_add_(1, want, at::full_like(own, -1));
      at::Tensor place = block(gradient);
      at::mul_out(place, probabilities, counted);
    }
    context->save_for_backward({gradient});
    return sum;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list outer) {
    return {context->get_saved_variables()[0] * outer[0], at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor wide_cross_entropy(const at::Tensor& logits, const at::Tensor& targets, std::int64_t ignored) { return WideCrossEntropy::apply(logits, targets, ignored); }

}  // namespace penstock::models
