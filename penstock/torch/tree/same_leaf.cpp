#include "penstock/torch/tree/same_leaf.h"

#include <ATen/ops/equal.h>

namespace penstock {

bool same_leaf(const Tree& a, const Tree& b) {
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Tree::Kind::Tensor:
      return a.tensor().sizes() == b.tensor().sizes() &&
             a.tensor().scalar_type() == b.tensor().scalar_type() && at::equal(a.tensor(), b.tensor());
    case Tree::Kind::Object:
      return a.ivalue() == b.ivalue();
    case Tree::Kind::Bool:
      return a.boolean() == b.boolean();
    case Tree::Kind::Int:
      return a.integer() == b.integer();
    case Tree::Kind::Double:
      return a.number() == b.number();
    case Tree::Kind::String:
      return a.text() == b.text();
    default:
      return true;
  }
}

}  // namespace penstock
