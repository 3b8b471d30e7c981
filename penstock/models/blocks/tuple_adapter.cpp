#include "penstock/models/blocks/tuple_adapter.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/models/blocks/input_check.h"

namespace penstock::models {
namespace {

bool is_present(const at::Tensor& loss) { return loss.defined() && loss.numel() > 0; }

void add_loss(BlockResult& result, const char* name, const at::Tensor& loss) {
  if (!is_present(loss)) return;
  if (loss.numel() != 1 || !loss.is_floating_point())
    throw ValueError(
        describe(fmt::format("from_tuple: loss '{}'", name), shown(loss), "one floating-point element"));
  result.losses.push_back({name, loss.reshape({})});
}

[[noreturn]] void unexpected(std::size_t elements, const char* expected, const char* remedy) {
  throw ValueError(describe("from_tuple", fmt::format("{} elements from a source without them", elements),
                            expected, remedy));
}

void add_three(BlockResult& result, const std::vector<at::Tensor>& tuple, TupleSource source) {
  switch (source) {
    case TupleSource::Dense:
      unexpected(3, "1 or 2 elements from TupleSource::Dense",
                 "state the block that made the tuple: Experts, Depth or DepthOverExperts");
    case TupleSource::Depth:
      return add_loss(result, kDepthRouterLoss, tuple[1]);
    case TupleSource::Experts:
    case TupleSource::DepthOverExperts:
      add_loss(result, kBalanceLoss, tuple[1]);
      add_loss(result, kRouterZLoss, tuple[2]);
      return;
  }
}

void add_five(BlockResult& result, const std::vector<at::Tensor>& tuple, TupleSource source) {
  if (source != TupleSource::Depth && source != TupleSource::DepthOverExperts)
    unexpected(5, "5 elements from a mixture of depths only", "state Depth or DepthOverExperts");
  if (is_present(tuple[1]) && is_present(tuple[2])) {
    add_loss(result, kBalanceLoss, tuple[1]);
    add_loss(result, kRouterZLoss, tuple[2]);
  }
  add_loss(result, kDepthRouterLoss, tuple[3]);
}

}  // namespace

BlockResult from_tuple(const std::vector<at::Tensor>& tuple, TupleSource source) {
  if (tuple.empty() || !tuple[0].defined())
    throw ValueError(describe("from_tuple", tuple.empty() ? "no elements" : "undefined hidden states",
                              "hidden states in the first element"));
  BlockResult result{tuple[0]};
  if (tuple.size() == 3) add_three(result, tuple, source);
  if (tuple.size() == 5) add_five(result, tuple, source);
  return result;
}

}  // namespace penstock::models
