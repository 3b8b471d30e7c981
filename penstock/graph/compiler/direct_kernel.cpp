#include "penstock/graph/compiler/direct_kernel.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "penstock/graph/compiler/plain_tensor.h"
#include "penstock/graph/compiler/strided_copy.h"
#include "penstock/torch/compat/blas_gemm.h"

namespace penstock::graph {
namespace {

bool is_plain_on_cpu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cpu() && is_plain(tensor);
}

at::Tensor contiguous_on_cpu(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::Tensor(at::detail::empty_cpu(sizes, dtype));
}

void put(const Step& step, Frame& frame, at::Tensor&& tensor) {
  if (step.results[0].kind == Result::Kind::Tensor) frame.slots[step.results[0].slot] = std::move(tensor);
}

const at::Tensor& argument(const Step& step, const Frame& frame, std::size_t i) {
  return frame.slots[step.arguments[i].slot];
}

// A matrix as it is in memory.
struct Matrix {
  std::int64_t rows = 0, columns = 0;
  std::int64_t row_stride = 0, column_stride = 0;
  // Of the last two dims.
  static Matrix of(const at::Tensor& tensor) {
    const auto dim = static_cast<std::size_t>(tensor.dim());
    const at::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
    return {sizes[dim - 2], sizes[dim - 1], strides[dim - 2], strides[dim - 1]};
  }
  Matrix transposed() const { return {columns, rows, column_stride, row_stride}; }
};

// How a factor is passed to BLAS: whether transposed, and with which stride. std::nullopt if it would have to
// be copied. `factor` is in column-major order if its rows are next to each other.
struct Passed {
  bool transposed = false;
  std::int64_t stride = 0;
};
std::optional<Passed> passed(const Matrix& factor) {
  const auto reaches = [](std::int64_t stride, std::int64_t size) {
    return stride >= std::max<std::int64_t>(1, size);
  };
  if (factor.row_stride == 1 && reaches(factor.column_stride, factor.rows))
    return Passed{false, factor.column_stride};
  if (factor.column_stride == 1 && reaches(factor.row_stride, factor.columns))
    return Passed{true, factor.row_stride};
  return std::nullopt;
}

// The product of two matrices in contiguous memory.
struct Product {
  BlasGemm gemm;
  bool exchanged = false;  // the second factor is A of BLAS
};

// As LibTorch decides it (addmm_impl_cpu_): a result in row-major order is computed as its transpose, from
// transposed factors in reverse order; one with a single column is in column-major order.
std::optional<Product> product_of(const Matrix& first, const Matrix& second) {
  const bool exchanged = second.columns != 1;
  const Matrix a = exchanged ? second.transposed() : first, b = exchanged ? first.transposed() : second;
  const auto how_a = passed(a), how_b = passed(b);
  if (!how_a || !how_b) return std::nullopt;
  Product product{{.transpose_a = how_a->transposed,
                   .transpose_b = how_b->transposed,
                   .m = a.rows,
                   .n = b.columns,
                   .k = a.columns,
                   .lda = how_a->stride,
                   .ldb = how_b->stride,
                   .ldc = exchanged ? second.columns : 1},
                  exchanged};
  if (!prepare_blas_gemm(product.gemm)) return std::nullopt;
  return product;
}

void multiply(const Product& product, at::ScalarType dtype, const void* first, const void* second,
              void* result, bool add) {
  blas_gemm(dtype, product.gemm, product.exchanged ? second : first, product.exchanged ? first : second,
            result, add);
}

// Whether two tensors have a product of this kind at all, so that the operator need not be asked for its
// error.
bool are_factors(const at::Tensor& first, const at::Tensor& second, std::int64_t dim) {
  if (!is_plain_on_cpu(first) || !is_plain_on_cpu(second) || first.dim() != dim || second.dim() != dim)
    return false;
  const Matrix a = Matrix::of(first), b = Matrix::of(second);
  return a.columns == b.rows && a.rows > 0 && a.columns > 0 && b.columns > 0 &&
         first.scalar_type() == second.scalar_type() && has_blas_gemm(first.scalar_type());
}

bool multiply_matrices(const Step& step, Frame& frame) {
  const at::Tensor &first = argument(step, frame, 0), &second = argument(step, frame, 1);
  if (!are_factors(first, second, 2)) return false;
  const auto product = product_of(Matrix::of(first), Matrix::of(second));
  if (!product) return false;
  const std::int64_t sizes[] = {first.sizes()[0], second.sizes()[1]};
  at::Tensor result = contiguous_on_cpu(sizes, first.scalar_type());
  multiply(*product, first.scalar_type(), first.data_ptr(), second.data_ptr(), result.data_ptr(), false);
  put(step, frame, std::move(result));
  return true;
}

// beta and alpha are 1.
bool multiply_and_add(const Step& step, Frame& frame) {
  const at::Tensor &added = argument(step, frame, 0), &first = argument(step, frame, 1),
                   &second = argument(step, frame, 2);
  if (!are_factors(first, second, 2) || !is_plain_on_cpu(added) || added.dim() > 2 ||
      added.scalar_type() != first.scalar_type())
    return false;
  const auto product = product_of(Matrix::of(first), Matrix::of(second));
  if (!product) return false;
  const std::int64_t sizes[] = {first.sizes()[0], second.sizes()[1]};
  // Broadcast.
  std::int64_t strides[] = {0, 0};
  for (std::size_t i = 0; i < added.sizes().size(); ++i) {
    const std::size_t dim = 2 - added.sizes().size() + i;
    if (added.sizes()[i] != sizes[dim] && added.sizes()[i] != 1) return false;
    if (added.sizes()[i] != 1) strides[dim] = added.strides()[i];
  }
  at::Tensor result = contiguous_on_cpu(sizes, first.scalar_type());
  if (!copy_to_contiguous(added, sizes, strides, result.data_ptr())) return false;
  multiply(*product, first.scalar_type(), first.data_ptr(), second.data_ptr(), result.data_ptr(), true);
  put(step, frame, std::move(result));
  return true;
}

bool multiply_batches(const Step& step, Frame& frame) {
  const at::Tensor &first = argument(step, frame, 0), &second = argument(step, frame, 1);
  if (!are_factors(first, second, 3) || first.sizes()[0] != second.sizes()[0] || first.sizes()[0] == 0)
    return false;
  const Matrix a = Matrix::of(first), b = Matrix::of(second);
  // LibTorch has a kernel of its own for smaller ones.
  constexpr std::int64_t kSmall = 400;
  if (a.rows * a.columns * b.columns < kSmall) return false;
  const auto product = product_of(a, b);
  if (!product) return false;
  const std::int64_t batches = first.sizes()[0];
  const std::int64_t sizes[] = {batches, a.rows, b.columns};
  const at::ScalarType dtype = first.scalar_type();
  at::Tensor result = contiguous_on_cpu(sizes, dtype);
  const auto item = static_cast<std::int64_t>(first.element_size());
  const char *from_first = static_cast<const char*>(first.data_ptr()),
             *from_second = static_cast<const char*>(second.data_ptr());
  char* to = static_cast<char*>(result.data_ptr());
  for (std::int64_t i = 0; i < batches; ++i) {
    multiply(*product, dtype, from_first, from_second, to, false);
    from_first += first.strides()[0] * item;
    from_second += second.strides()[0] * item;
    to += a.rows * b.columns * item;
  }
  put(step, frame, std::move(result));
  return true;
}

bool copy(const Step& step, Frame& frame) {
  const at::Tensor& from = argument(step, frame, 0);
  if (!is_plain_on_cpu(from)) return false;
  at::Tensor result = contiguous_on_cpu(from.sizes(), from.scalar_type());
  if (!copy_to_contiguous(from, from.sizes(), from.strides(), result.data_ptr())) return false;
  put(step, frame, std::move(result));
  return true;
}

bool is_one(const Operand& operand) {
  return operand.kind == Operand::Kind::Constant && operand.symbolic == kNotSymbolic &&
         operand.constant.isScalar() && !operand.constant.isBool() && operand.constant.toScalar().equal(1);
}

bool makes_contiguous(const Operand& operand) {
  return operand.kind == Operand::Kind::Constant && operand.symbolic == kNotSymbolic &&
         operand.constant.isInt() && operand.constant.toMemoryFormat() == at::MemoryFormat::Contiguous;
}

}  // namespace

DirectKernel direct_kernel(const Node& node) {
  const c10::OperatorName& name = node.op.operator_name();
  if (!name.overload_name.empty()) return nullptr;
  if (name.name == "aten::mm") return &multiply_matrices;
  if (name.name == "aten::bmm") return &multiply_batches;
  if (name.name == "aten::addmm")
    return is_one(node.arguments[3]) && is_one(node.arguments[4]) ? &multiply_and_add : nullptr;
  if (name.name == "aten::clone") return makes_contiguous(node.arguments[1]) ? &copy : nullptr;
  return nullptr;
}

bool direct_kernels_allowed() { return !at::globalContext().deterministicAlgorithms(); }

void call_direct(const Step& step, Frame& frame) {
  if (!frame.direct_kernels || !step.kernel(step, frame)) step.otherwise(step, frame);
}

}  // namespace penstock::graph
