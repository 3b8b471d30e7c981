#include "penstock/graph/trace/fake_in_place.h"

#include <mutex>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/graph/ir/subclass_record.h"
#include "penstock/tensor_subclass.h"
#include "penstock/torch/dispatch/switch_data.h"

namespace penstock::graph {
namespace {

WeakNodePtr accumulator_of(const at::Tensor& tensor) {
  auto* autograd = torch::autograd::impl::get_autograd_meta(tensor);
  if (!autograd) return WeakNodePtr(NodePtr());
  const std::lock_guard lock(autograd->mutex_);
  return autograd->grad_accumulator_;
}

}  // namespace

FakeInPlace::FakeInPlace(const std::vector<at::Tensor>& tensors, std::optional<at::Device> of_meta) {
  replaced_.reserve(tensors.size());
  try {
    for (const at::Tensor& tensor : tensors) {
      for (const at::Tensor& part : plain_parts(tensor))
        if (is_fake(part))
          throw TypeError(describe("graph: a parameter or buffer", "a fake tensor",
                                   "a real one, or a subclass of real ones",
                                   "materialize the module before capturing it"));
      Replaced replaced{tensor, tensor.variable_data(), accumulator_of(tensor), {}, {}};
      replaced.switched = of_meta && replaced.real.is_meta();
      if (replaced.switched)
        switch_data(tensor, to_fake(replaced.real, *of_meta));
      else
        replace_data(tensor, to_fake_parts(replaced.real));
      if (auto* autograd = torch::autograd::impl::get_autograd_meta(tensor)) {
        replaced.hooks.swap(autograd->hooks_);
        replaced.hook_functions.swap(autograd->cpp_hooks_list_);
      }
      replaced_.push_back(std::move(replaced));
    }
  } catch (...) {
    restore();
    throw;
  }
}

FakeInPlace::~FakeInPlace() { restore(); }

void FakeInPlace::restore() noexcept {
  for (Replaced& replaced : replaced_) {
    if (replaced.switched)
      switch_data(replaced.tensor, replaced.real);
    else
      replace_data(replaced.tensor, replaced.real);
    if (auto* autograd = torch::autograd::impl::get_autograd_meta(replaced.tensor)) {
      const std::lock_guard lock(autograd->mutex_);
      autograd->grad_accumulator_ = replaced.accumulator;
      autograd->hooks_.swap(replaced.hooks);
      autograd->cpp_hooks_list_.swap(replaced.hook_functions);
    }
  }
  replaced_.clear();
}

}  // namespace penstock::graph
