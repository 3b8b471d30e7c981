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

UserWrapper::Prepared UserWrapper::prepare(Values& inputs, const Convention& convention) const {
  std::vector<std::string> names(inputs.size()), replaced_names;
  for (std::size_t i = convention.found; i < inputs.size(); ++i) names[i] = convention.name_of(i);
  Values passed = users_inputs(*user_, names, inputs);
  Prepared prepared;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!is_defined_tensor(inputs[i])) continue;
    if (!is_defined_tensor(passed[i]))
      throw ValueError(fmt::format("graph: wrapper '{}' returned an undefined tensor for {}; return a tensor",
                                   name_, names[i]));
    if (passed[i].toTensor().is_same(inputs[i].toTensor())) continue;
    replaced_names.push_back(names[i]);
    prepared.replaced.push_back(i);
  }
  inputs = std::move(passed);
  prepared.applied =
      std::make_shared<const AppliedUserWrapper>(user_, name_, std::move(names), std::move(replaced_names));
  return prepared;
}

void UserWrapper::check_writes(const Prepared& prepared, const ViewAndMutationMeta& meta,
                               const Convention& convention) const {
  for (const std::size_t i : prepared.replaced)
    if (meta.inputs[i].is_touched)
      throw NotImplemented(
          fmt::format("graph: wrapper '{}' replaces {}, which the function writes: the write would not reach "
                      "it; return it unchanged, or write a copy in the function",
                      name_, convention.name_of(i)));
}

std::shared_ptr<const AppliedWrapper> UserWrapper::apply(FunctionForm& form) const {
  Values inputs = form.inputs();
  const Prepared prepared = prepare(inputs, form.convention());
  if (!prepared.replaced.empty()) {
    std::vector<std::size_t> all(inputs.size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    form.replace(form.function(), std::move(inputs), form.convention(), all);
  }
  check_writes(prepared, form.meta(), form.convention());
  return prepared.applied;
}

CallWrappers call_wrappers_with(const std::vector<std::shared_ptr<const ValueWrapper>>& users) {
  CallWrappers all;
  for (const auto& user : users) all.push_back(std::make_shared<const UserWrapper>(user));
  all.insert(all.end(), default_call_wrappers().begin(), default_call_wrappers().end());
  return all;
}

}  // namespace penstock::graph
