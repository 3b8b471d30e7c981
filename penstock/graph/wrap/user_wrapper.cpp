#include "penstock/graph/wrap/user_wrapper.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <numeric>

#include "penstock/errors.h"

namespace penstock::graph {
namespace {

// `names`: of the inputs that are passed to the user; empty for the others.
Values users_inputs(const ValueWrapper& user, const std::vector<std::string>& names, Values inputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i)
    if (!names[i].empty() && is_defined_tensor(inputs[i]))
      inputs[i] = user.input(names[i], inputs[i].toTensor());
  return inputs;
}

class AppliedUserWrapper final : public AppliedWrapper {
 public:
  AppliedUserWrapper(std::shared_ptr<const ValueWrapper> user, std::string name,
                     std::vector<std::string> names, std::vector<std::string> replaced)
      : user_(std::move(user)),
        name_(std::move(name)),
        names_(std::move(names)),
        replaced_(std::move(replaced)) {}

  std::string_view name() const override { return name_; }
  std::string decision() const override {
    return replaced_.empty() ? std::string() : fmt::format("replaces {}", fmt::join(replaced_, ", "));
  }
  Call around(Call inner, const ViewAndMutationMeta&) const override {
    return [user = user_, names = names_, inner = std::move(inner)](const Values& inputs,
                                                                    const CallSizes& sizes) {
      Values results = inner(users_inputs(*user, names, inputs), sizes);
      for (std::size_t i = 0; i < results.size(); ++i)
        if (is_defined_tensor(results[i])) results[i] = user->result(i, results[i].toTensor());
      return results;
    };
  }
  bool same_but_for_sizes(const AppliedWrapper& other) const override {
    const auto* theirs = dynamic_cast<const AppliedUserWrapper*>(&other);
    return theirs && user_ == theirs->user_ && names_ == theirs->names_ && replaced_ == theirs->replaced_;
  }

 private:
  std::shared_ptr<const ValueWrapper> user_;
  std::string name_;
  std::vector<std::string> names_, replaced_;
};

}  // namespace

UserWrapper::UserWrapper(std::shared_ptr<const ValueWrapper> user) : user_(std::move(user)) {
  if (!user_) throw ValueError("graph: one of the wrappers is null; pass wrappers only");
  name_ = user_->name();
}

std::shared_ptr<const AppliedWrapper> UserWrapper::apply(FunctionForm& form) const {
  const Values before = form.inputs();
  std::vector<std::string> names(before.size()), replaced;
  for (std::size_t i = form.convention().found; i < before.size(); ++i) names[i] = form.name_of(i);
  Values inputs = users_inputs(*user_, names, before);
  std::vector<std::size_t> replaced_inputs;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!is_defined_tensor(before[i])) continue;
    if (!is_defined_tensor(inputs[i]))
      throw ValueError(fmt::format("graph: wrapper '{}' returned an undefined tensor for {}; return a tensor",
                                   name_, names[i]));
    if (inputs[i].toTensor().is_same(before[i].toTensor())) continue;
    replaced.push_back(names[i]);
    replaced_inputs.push_back(i);
  }
  if (!replaced.empty()) {
    std::vector<std::size_t> all(inputs.size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    form.replace(form.function(), std::move(inputs), form.convention(), all);
  }
  for (const std::size_t i : replaced_inputs)
    if (form.meta().inputs[i].is_touched)
      throw NotImplemented(fmt::format(
          "graph: wrapper '{}' replaces {}, which the function writes: the write would not reach it; "
          "return it unchanged, or write a copy in the function",
          name_, names[i]));
  return std::make_shared<const AppliedUserWrapper>(user_, name_, std::move(names), std::move(replaced));
}

CallWrappers call_wrappers_with(const std::vector<std::shared_ptr<const ValueWrapper>>& users) {
  CallWrappers all;
  for (const auto& user : users) all.push_back(std::make_shared<const UserWrapper>(user));
  all.insert(all.end(), default_call_wrappers().begin(), default_call_wrappers().end());
  return all;
}

}  // namespace penstock::graph
