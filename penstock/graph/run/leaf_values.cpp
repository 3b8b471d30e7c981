#include "penstock/graph/run/leaf_values.h"

#include "penstock/pytree_convert.h"

namespace penstock::graph {

Values values_of_leaves(const std::vector<Tree>& leaves) {
  Values values;
  values.reserve(leaves.size());
  for (const Tree& leaf : leaves)
    values.push_back(leaf.is_tensor() ? c10::IValue(leaf.tensor()) : tree_to_ivalue(leaf));
  return values;
}

std::vector<Tree> leaves_of_values(std::span<const c10::IValue> values) {
  std::vector<Tree> leaves;
  leaves.reserve(values.size());
  for (const c10::IValue& value : values)
    leaves.push_back(value.isTensor() ? Tree(value.toTensor()) : tree_from_ivalue(value));
  return leaves;
}

}  // namespace penstock::graph
