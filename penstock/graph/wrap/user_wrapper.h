// A wrapper of a user (value_wrapper.h) as one of the list.
#pragma once

#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/graph/wrap/call_wrapper.h"
#include "penstock/value_wrapper.h"

namespace penstock::graph {

class UserWrapper final : public CallWrapper {
 public:
  explicit UserWrapper(std::shared_ptr<const ValueWrapper> user);
  std::string_view name() const override { return name_; }
  std::shared_ptr<const AppliedWrapper> apply(FunctionForm& form) const override;

  // For a function that cannot run, or be analyzed, on inputs that were not replaced: replaces them, and
  // checks afterwards, by the metadata of the function, that it writes none that was replaced.
  struct Prepared {
    std::shared_ptr<const AppliedWrapper> applied;
    std::vector<std::size_t> replaced;
  };
  Prepared prepare(Values& inputs, const Convention& convention) const;
  void check_writes(const Prepared& prepared, const ViewAndMutationMeta& meta,
                    const Convention& convention) const;

 private:
  std::shared_ptr<const ValueWrapper> user_;
  std::string name_;
};

// Those of a user, then the library's own. Throws ValueError for a null pointer.
CallWrappers call_wrappers_with(const std::vector<std::shared_ptr<const ValueWrapper>>& users);

}  // namespace penstock::graph
