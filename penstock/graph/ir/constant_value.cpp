#include "penstock/graph/ir/constant_value.h"

#include <ATen/ATen.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>

#include "penstock/base/hash.h"

namespace penstock::graph {
namespace {

bool is_plain_number(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number() && tensor.dim() == 0 && tensor.is_cpu();
}

bool same_tensor_constant(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  if (a.is_same(b)) return true;
  return is_plain_number(a) && is_plain_number(b) && a.scalar_type() == b.scalar_type() && a.has_storage() &&
         b.has_storage() && std::memcmp(a.data_ptr(), b.data_ptr(), a.itemsize()) == 0;
}

bool same_elements(c10::ArrayRef<c10::IValue> a, c10::ArrayRef<c10::IValue> b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!same_constant(a[i], b[i])) return false;
  return true;
}

bool same_bits(double a, double b) {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
}

}  // namespace

bool same_constant(const c10::IValue& a, const c10::IValue& b) {
  if (a.isNone() || b.isNone()) return a.isNone() && b.isNone();
  if (a.isInt() && b.isInt()) return a.toInt() == b.toInt();
  if (a.isDouble() && b.isDouble()) return same_bits(a.toDouble(), b.toDouble());
  if (a.isBool() && b.isBool()) return a.toBool() == b.toBool();
  if (a.isComplexDouble() && b.isComplexDouble())
    return same_bits(a.toComplexDouble().real(), b.toComplexDouble().real()) &&
           same_bits(a.toComplexDouble().imag(), b.toComplexDouble().imag());
  if (a.isString() && b.isString()) return a.toStringRef() == b.toStringRef();
  if (a.isDevice() && b.isDevice()) return a.toDevice() == b.toDevice();
  if (a.isTensor() && b.isTensor()) return same_tensor_constant(a.toTensor(), b.toTensor());
  if (a.isTuple() && b.isTuple()) return same_elements(a.toTupleRef().elements(), b.toTupleRef().elements());
  if (a.isIntList() && b.isIntList()) return a.toIntVector() == b.toIntVector();
  if (a.isDoubleList() && b.isDoubleList()) {
    const std::vector<double> x = a.toDoubleVector(), y = b.toDoubleVector();
    return x.size() == y.size() &&
           (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(double)) == 0);
  }
  if (a.isList() && b.isList()) return same_elements(a.toListRef(), b.toListRef());
  return a.is(b);
}

std::size_t hash_of_constant(const c10::IValue& value) {
  HashBuilder hash;
  if (value.isInt()) return hash.add(1).add(value.toInt()).value();
  if (value.isDouble()) return hash.add(2).add(std::bit_cast<std::uint64_t>(value.toDouble())).value();
  if (value.isBool()) return hash.add(3).add(value.toBool()).value();
  if (value.isString()) return hash.add(4).add(value.toStringRef()).value();
  if (value.isIntList()) {
    hash.add(5);
    for (const std::int64_t item : value.toIntVector()) hash.add(item);
    return hash.value();
  }
  return hash.add(6).value();
}

}  // namespace penstock::graph
