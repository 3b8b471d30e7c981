#include "penstock/train/job/step_sums.h"

#include <ATen/ATen.h>

#include <cstddef>

namespace penstock::train {

StepSums read_sums(const std::vector<at::Tensor>& losses, const std::vector<at::Tensor>& auxiliary) {
  std::vector<at::Tensor> present, vectors;
  for (const at::Tensor& loss : auxiliary)
    if (loss.defined()) present.push_back(loss);
  if (!losses.empty()) vectors.push_back(at::stack(losses).to(at::kDouble));
  if (!present.empty()) vectors.push_back(at::stack(present).to(at::kDouble));
  StepSums sums;
  sums.auxiliary.resize(auxiliary.size());
  if (vectors.empty()) return sums;
  const at::Tensor read = at::cat(vectors).cpu();
  const double* next = read.data_ptr<double>();
  for (std::size_t i = 0; i < losses.size(); ++i) sums.loss += *next++;
  for (std::size_t i = 0; i < auxiliary.size(); ++i)
    if (auxiliary[i].defined()) sums.auxiliary[i] = *next++;
  return sums;
}

}  // namespace penstock::train
