#include "penstock/torch/experts/grouped_product.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/autograd_node.h"
#include "penstock/torch/dispatch/once_differentiable.h"
#include "penstock/torch/experts/expert_kernels.h"

namespace penstock {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::string matrix_text(const at::Tensor& tensor) {
  return fmt::format("{} of {}", fmt::join(tensor.sizes(), " x "), c10::toString(tensor.scalar_type()));
}

void check_ends(const at::Tensor& ends, std::int64_t experts) {
  if (ends.dim() != 1 || ends.scalar_type() != at::kInt || (experts >= 0 && ends.size(0) != experts))
    throw ValueError(describe("grouped_product: ends", matrix_text(ends),
                              experts >= 0 ? fmt::format("{} of Int", experts) : "a row of Int",
                              "use the ends of expert_order()"));
}

// ---- rows [S, D], weight [experts, D, F] (transposed: [experts, F, D]) -> [S, F] ----

using Sizes = std::vector<std::int64_t>;

Sizes product_sizes(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& ends,
                    bool transposed) {
  if (rows.dim() != 2 || weight.dim() != 3 || rows.scalar_type() != weight.scalar_type() ||
      rows.size(1) != weight.size(transposed ? 2 : 1))
    throw ValueError(describe("grouped_product: rows and weight",
                              fmt::format("{} and {}", matrix_text(rows), matrix_text(weight)),
                              "[rows, in] and [experts, in, out] of the same dtype",
                              "under autocast, cast both to its dtype first"));
  check_ends(ends, weight.size(0));
  return {rows.size(0), weight.size(transposed ? 1 : 2)};
}

at::Tensor grouped_product_meta(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& ends,
                                bool transposed) {
  return at::empty(product_sizes(rows, weight, ends, transposed), rows.options());
}

// Calls product(expert, first row, number of rows) for each expert in turn. Returns the end of the last.
template <class Product>
std::int64_t for_each_expert(const at::Tensor& ends, std::int64_t rows, const Product& product) {
  const at::Tensor bounds = ends.contiguous();
  const std::int32_t* end = bounds.data_ptr<std::int32_t>();
  std::int64_t first = 0;
  for (std::int64_t expert = 0; expert < bounds.numel(); ++expert) {
    if (end[expert] < first || end[expert] > rows)
      throw ValueError(describe(fmt::format("grouped_product: end of expert {}", expert),
                                fmt::format("{}", end[expert]), fmt::format("from {} to {}", first, rows)));
    product(expert, first, end[expert] - first);
    first = end[expert];
  }
  return first;
}

// LibTorch's products of 16-bit matrices on the CPU may add up in 16 bits. Autocast, which would round the
// float32 factors again, is on in a forward, and off in a backward and when a captured graph runs.
void multiply_into(at::Tensor result, const at::Tensor& a, const at::Tensor& b) {
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  const auto dtype = result.scalar_type();
  if (dtype == at::kBFloat16 || dtype == at::kHalf)
    result.copy_(at::mm(a.to(at::kFloat), b.to(at::kFloat)));
  else
    at::mm_out(result, a, b);
}

at::Tensor grouped_product_cpu(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& ends,
                               bool transposed) {
  at::Tensor result = at::empty(product_sizes(rows, weight, ends, transposed), rows.options());
  const std::int64_t end =
      for_each_expert(ends, rows.size(0), [&](std::int64_t expert, std::int64_t first, std::int64_t count) {
        if (count == 0) return;
        multiply_into(result.narrow(0, first, count), rows.narrow(0, first, count),
                      transposed ? weight[expert].t() : weight[expert]);
      });
  if (end < rows.size(0)) result.narrow(0, end, rows.size(0) - end).zero_();
  return result;
}

std::atomic<GroupedProductPath> product_path{GroupedProductPath::Auto};

bool may_use_library() { return product_path.load() == GroupedProductPath::Auto; }

at::Tensor grouped_product_cuda(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& ends,
                                bool transposed) {
  const Sizes sizes = product_sizes(rows, weight, ends, transposed);
  if (sizes[0] == 0 || sizes[1] == 0) return at::empty(sizes, rows.options());
  if (rows.size(1) == 0) return at::zeros(sizes, rows.options());
  return detail::launch_grouped_product(rows.contiguous(), weight.contiguous(), ends.contiguous(), transposed,
                                        may_use_library());
}

// ---- rows [S, D], gradient [S, F] -> [experts, D, F]: the sum of outer products of each expert ----

Sizes outer_sizes(const at::Tensor& rows, const at::Tensor& gradient, const at::Tensor& ends) {
  if (rows.dim() != 2 || gradient.dim() != 2 || rows.size(0) != gradient.size(0) ||
      rows.scalar_type() != gradient.scalar_type())
    throw ValueError(describe("grouped_outer: rows and gradient",
                              fmt::format("{} and {}", matrix_text(rows), matrix_text(gradient)),
                              "as many rows in both, of the same dtype"));
  check_ends(ends, -1);
  return {ends.size(0), rows.size(1), gradient.size(1)};
}

at::Tensor grouped_outer_meta(const at::Tensor& rows, const at::Tensor& gradient, const at::Tensor& ends) {
  return at::empty(outer_sizes(rows, gradient, ends), rows.options());
}

at::Tensor grouped_outer_cpu(const at::Tensor& rows, const at::Tensor& gradient, const at::Tensor& ends) {
  at::Tensor result = at::empty(outer_sizes(rows, gradient, ends), rows.options());
  for_each_expert(ends, rows.size(0), [&](std::int64_t expert, std::int64_t first, std::int64_t count) {
    at::Tensor part = result[expert];
    if (count == 0)
      part.zero_();
    else
      multiply_into(part, rows.narrow(0, first, count).t(), gradient.narrow(0, first, count));
  });
  return result;
}

at::Tensor grouped_outer_cuda(const at::Tensor& rows, const at::Tensor& gradient, const at::Tensor& ends) {
  const Sizes sizes = outer_sizes(rows, gradient, ends);
  if (rows.numel() == 0 || gradient.numel() == 0) return at::zeros(sizes, rows.options());
  return detail::launch_grouped_outer(rows.contiguous(), gradient.contiguous(), ends.contiguous(),
                                      may_use_library());
}

// ---- joined weights ----

using MaybeTensor = c10::optional<at::Tensor>;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

at::Tensor joined_like(const at::Tensor& first, const MaybeTensor& second, at::ScalarType dtype) {
  if (first.dim() != 3 || (second && (second->dim() != 3 || first.size(0) != second->size(0) ||
                                      first.size(1) != second->size(1))))
    throw ValueError(
        describe("join_columns: weights",
                 fmt::format("{} and {}", matrix_text(first), second ? matrix_text(*second) : "none"),
                 "[experts, in, out], equal but for the last dim"));
  return at::empty({first.size(0), first.size(1), first.size(2) + (second ? second->size(2) : 0)},
                   first.options().dtype(dtype));
}
at::Tensor join_columns_cpu(const at::Tensor& first, const MaybeTensor& second, at::ScalarType dtype) {
  at::Tensor joint = joined_like(first, second, dtype);
  joint.narrow(2, 0, first.size(2)).copy_(first);
  if (second) joint.narrow(2, first.size(2), second->size(2)).copy_(*second);
  return joint;
}
at::Tensor join_columns_cuda(const at::Tensor& first, const MaybeTensor& second, at::ScalarType dtype) {
  at::Tensor joint = joined_like(first, second, dtype);
  if (joint.numel() > 0)
    detail::launch_join_columns(first.contiguous(), second ? second->contiguous() : at::Tensor(), joint);
  return joint;
}

// The first `width` columns and the others. Both contiguous: an optimizer reads them more than once.
TwoTensors split_like(const at::Tensor& joint, std::int64_t width, at::ScalarType dtype) {
  const auto part = [&](std::int64_t columns) {
    return at::empty({joint.size(0), joint.size(1), columns}, joint.options().dtype(dtype));
  };
  return {part(width), part(joint.size(2) - width)};
}
TwoTensors split_columns_cpu(const at::Tensor& joint, std::int64_t width, at::ScalarType dtype) {
  TwoTensors parts = split_like(joint, width, dtype);
  std::get<0>(parts).copy_(joint.narrow(2, 0, width));
  std::get<1>(parts).copy_(joint.narrow(2, width, joint.size(2) - width));
  return parts;
}
TwoTensors split_columns_cuda(const at::Tensor& joint, std::int64_t width, at::ScalarType dtype) {
  TwoTensors parts = split_like(joint, width, dtype);
  if (joint.numel() > 0)
    detail::launch_split_columns(joint.contiguous(), std::get<0>(parts),
                                 width < joint.size(2) ? std::get<1>(parts) : at::Tensor());
  return parts;
}

// ---- through the dispatcher, so that modes see them ----

at::Tensor call_product(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& ends,
                        bool transposed) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("penstock::grouped_product", "")
                             .typed<decltype(grouped_product_cpu)>();
  return op.call(rows, weight, ends, transposed);
}
at::Tensor call_outer(const at::Tensor& rows, const at::Tensor& gradient, const at::Tensor& ends) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("penstock::grouped_outer", "")
                             .typed<decltype(grouped_outer_cpu)>();
  return op.call(rows, gradient, ends);
}

// A node of its own, because it saves its tensors before the product is computed, as LibTorch's nodes do: a
// recomputed part (recompute.h) whose last product this is ends before it.
class GroupedProductNode final : public torch::autograd::Node {
 public:
  GroupedProductNode(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& ends)
      : Node(torch::autograd::collect_next_edges(rows, weight)),
        rows_(rows, /*is_output=*/false),
        weight_(weight, /*is_output=*/false),
        ends_(ends, /*is_output=*/false) {}

  std::string name() const override { return "GroupedProduct"; }
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    rows_.reset_data();
    weight_.reset_data();
    ends_.reset_data();
  }

 private:
  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard lock(mutex_);
    if (!gradients[0].defined()) return variable_list(2);
    const bool recorded = c10::GradMode::is_enabled();
    const c10::AutoGradMode unrecorded(false);
    const at::Tensor rows = rows_.unpack(), weight = weight_.unpack(), ends = ends_.unpack(),
                     gradient = gradients[0].contiguous();
    variable_list results{
        task_should_compute_output(0) ? call_product(gradient, weight, ends, true) : at::Tensor(),
        task_should_compute_output(1) ? call_outer(rows, gradient, ends) : at::Tensor()};
    if (recorded) refuse_second_derivative("penstock::grouped_product", gradients, next_edges(), results);
    return results;
  }

  torch::autograd::SavedVariable rows_, weight_, ends_;
};

struct JoinColumns : torch::autograd::Function<JoinColumns> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& first, const MaybeTensor& second,
                            at::ScalarType dtype) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("penstock::join_columns", "")
                               .typed<decltype(join_columns_cpu)>();
    context->saved_data["first"] = first.size(2);
    context->saved_data["second"] = second.has_value();
    context->saved_data["dtype"] = first.scalar_type();
    return op.call(first, second, dtype);
  }
  // Linear. LibTorch's views and casts can be differentiated again; the operator copies, but in one pass.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("penstock::split_columns", "")
                               .typed<decltype(split_columns_cpu)>();
    const std::int64_t width = context->saved_data["first"].toInt();
    const at::ScalarType dtype = context->saved_data["dtype"].toScalarType();
    const bool has_second = context->saved_data["second"].toBool();
    if (c10::GradMode::is_enabled()) {
      const at::Tensor& joint = gradients[0];
      return {joint.narrow(2, 0, width).to(dtype),
              has_second ? joint.narrow(2, width, joint.size(2) - width).to(dtype) : at::Tensor(),
              at::Tensor()};
    }
    auto [first, second] = op.call(gradients[0], width, dtype);
    return {first, has_second ? second : at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor join_columns(const at::Tensor& first, const at::Tensor& second, at::ScalarType dtype) {
  return JoinColumns::apply(first, second.defined() ? MaybeTensor(second) : MaybeTensor(), dtype);
}

at::Tensor grouped_product(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& ends) {
  if (!at::GradMode::is_enabled() || !(rows.requires_grad() || weight.requires_grad()))
    return call_product(rows, weight, ends, false);
  const auto node = make_node<GroupedProductNode>(rows, weight, ends);
  const c10::AutoGradMode no_grad(false);
  const at::Tensor product = call_product(rows, weight, ends, false);
  torch::autograd::impl::set_gradient_edge(product, {node, node->add_input_metadata(product)});
  return product;
}

GroupedProductPath set_grouped_product_path(GroupedProductPath path) { return product_path.exchange(path); }

TORCH_LIBRARY_FRAGMENT(penstock, library) {
  library.def("grouped_product(Tensor rows, Tensor weight, Tensor ends, bool transposed) -> Tensor");
  library.def("join_columns(Tensor first, Tensor? second, ScalarType dtype) -> Tensor");
  library.def("split_columns(Tensor joint, int width, ScalarType dtype) -> (Tensor, Tensor)");
  library.def("grouped_outer(Tensor rows, Tensor gradient, Tensor ends) -> Tensor");
}
TORCH_LIBRARY_IMPL(penstock, CPU, library) {
  library.impl("grouped_product", &grouped_product_cpu);
  library.impl("grouped_outer", &grouped_outer_cpu);
  library.impl("join_columns", &join_columns_cpu);
  library.impl("split_columns", &split_columns_cpu);
}
TORCH_LIBRARY_IMPL(penstock, CUDA, library) {
  library.impl("grouped_product", &grouped_product_cuda);
  library.impl("grouped_outer", &grouped_outer_cuda);
  library.impl("join_columns", &join_columns_cuda);
  library.impl("split_columns", &split_columns_cuda);
}
TORCH_LIBRARY_IMPL(penstock, Meta, library) {
  library.impl("grouped_product", &grouped_product_meta);
  library.impl("grouped_outer", &grouped_outer_meta);
  library.impl("join_columns", &joined_like);
  library.impl("split_columns", &split_like);
}

}  // namespace penstock
