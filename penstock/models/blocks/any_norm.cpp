#include "penstock/models/blocks/any_norm.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace penstock::models {

AnyNorm::AnyNorm(const NormOptions& options) {
  options.check();
  switch (options.kind) {
    case NormKind::RmsNorm:
      norm_ = RmsNorm(options.width, options.epsilon);
      break;
    case NormKind::DynamicTanh:
      norm_ = DynamicTanh(options.width);
      break;
  }
}

std::shared_ptr<torch::nn::Module> AnyNorm::module() const {
  return std::visit([](const auto& norm) -> std::shared_ptr<torch::nn::Module> { return norm.ptr(); }, norm_);
}

at::Tensor AnyNorm::forward(const at::Tensor& x) const {
  return std::visit([&](const auto& norm) { return norm.ptr()->forward(x); }, norm_);
}

void AnyNorm::initialize(const std::string& name, const BlockInit& init) const {
  if (const auto* bounded = std::get_if<DynamicTanh>(&norm_)) return bounded->ptr()->initialize(name, init);
  const c10::AutoGradMode no_grad(false);
  std::get<RmsNorm>(norm_).ptr()->weight.fill_(1);
}

AnyNorm make_norm(std::string_view kind, std::int64_t width, double epsilon) {
  return AnyNorm(NormOptions{.kind = norm_kind_from(kind), .width = width, .epsilon = epsilon});
}

}  // namespace penstock::models
