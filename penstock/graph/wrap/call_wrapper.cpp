#include "penstock/graph/wrap/call_wrapper.h"

#include <fmt/format.h>

#include <utility>

#include "penstock/errors.h"
#include "penstock/graph/wrap/duplicate_inputs.h"
#include "penstock/graph/wrap/lazy_inputs.h"
#include "penstock/graph/wrap/synthetic_bases.h"

namespace penstock::graph {

const CallWrappers& default_call_wrappers() {
  static const CallWrappers all{std::make_shared<DuplicateInputsWrapper>(),
                                std::make_shared<SyntheticBasesWrapper>(),
                                std::make_shared<LazyInputsWrapper>()};
  return all;
}

void AppliedWrapper::save(GraphEncoder&) const {
  throw NotImplemented(fmt::format(
      "graph: wrapper '{}' cannot be saved; implement AppliedWrapper::save and CallWrapper::load", name()));
}

std::shared_ptr<const AppliedWrapper> CallWrapper::load(GraphDecoder&, std::size_t) const {
  throw NotImplemented(fmt::format(
      "graph: wrapper '{}' cannot be loaded; implement AppliedWrapper::save and CallWrapper::load", name()));
}

std::vector<WrapperInUse> apply(const CallWrappers& wrappers, FunctionForm& form) {
  std::vector<WrapperInUse> used;
  for (const auto& wrapper : wrappers) {
    ViewAndMutationMeta outer = form.meta();
    if (auto applied = wrapper->apply(form)) used.push_back({std::move(applied), std::move(outer)});
  }
  return used;
}

Call wrap(Call inner, const std::vector<WrapperInUse>& used) {
  for (auto it = used.rbegin(); it != used.rend(); ++it)
    inner = it->wrapper->around(std::move(inner), it->outer);
  return inner;
}

}  // namespace penstock::graph
