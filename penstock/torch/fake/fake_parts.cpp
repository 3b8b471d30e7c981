#include "penstock/torch/fake/fake_parts.h"

#include <ATen/ATen.h>

#include "penstock/fake.h"
#include "penstock/mode.h"
#include "penstock/tensor_subclass.h"
#include "penstock/torch/dispatch/switch_data.h"

namespace penstock {
namespace {

bool holds_fake(const at::Tensor& tensor) {
  if (is_fake(tensor)) return true;
  const Payload* payload = payload_of(tensor);
  if (!payload) return false;
  for (const auto& [name, inner] : payload->inner_tensors())
    if (holds_fake(inner)) return true;
  return false;
}

thread_local std::vector<const FakeLeaves*> scopes;  // the active scopes, in the order in which they started

void put_back(const std::vector<std::pair<at::Tensor, at::Tensor>>& replaced) {
  const at::NoGradGuard no_grad;
  for (const auto& [tensor, before] : replaced) {
    if (tensor.sizes() == before.sizes()) {
      switch_data(tensor, before);
    } else {  // an operator changed the shape in place
      tensor.set_data(before);
    }
  }
}

}  // namespace

at::Tensor to_fake_parts(const at::Tensor& tensor) {
  const Payload* payload = payload_of(tensor);
  if (!payload || is_fake(tensor)) return to_fake(tensor);
  std::vector<at::Tensor> inner;
  // The tensors inside a wrapper are below autograd.
  for (const auto& [name, part] : payload->inner_tensors())
    inner.push_back(to_fake_parts(part.requires_grad() ? part.detach() : part));
  at::Tensor fake = payload->rebuild(inner, geometry_of(tensor));
  fake.set_requires_grad(tensor.requires_grad());
  return fake;
}

FakeLeaves::FakeLeaves(const std::vector<at::Tensor>& tensors) {
  const NoModesGuard no_modes;
  const at::NoGradGuard no_grad;
  replaced_.reserve(tensors.size());
  try {
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.is_leaf() || holds_fake(tensor)) continue;
      const at::Tensor fake = to_fake_parts(tensor.detach());
      replaced_.emplace_back(tensor, tensor.variable_data());
      switch_data(tensor, fake);
    }
    scopes.push_back(this);
  } catch (...) {
    put_back(replaced_);
    throw;
  }
}

FakeLeaves::~FakeLeaves() {
  std::erase(scopes, this);
  put_back(replaced_);
}

RealLeaves::RealLeaves() {
  const at::NoGradGuard no_grad;
  for (const FakeLeaves* scope : scopes)
    for (const auto& [tensor, real] : scope->replaced_) {
      if (tensor.sizes() != real.sizes()) continue;
      replaced_.emplace_back(tensor, tensor.variable_data());
      switch_data(tensor, real);
    }
}

RealLeaves::~RealLeaves() { put_back(replaced_); }

}  // namespace penstock
