#include "penstock/comm/group/operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <mutex>
#include <numeric>
#include <unordered_map>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/random/unit_half.h"
#include "penstock/world.h"

namespace penstock::comm {

namespace {

using at::Tensor;
using Ints = std::vector<std::int64_t>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Results whose Work has not been waited for, by storage. A Work keeps its tensor alive, so a key cannot be
// reused while it is present.
class Unfinished {
 public:
  void put(const Tensor& result, Work work) {
    std::lock_guard lock(mutex_);
    works_.insert_or_assign(result.storage().unsafeGetStorageImpl(), std::move(work));
  }
  Work take(const Tensor& result) {
    std::lock_guard lock(mutex_);
    const auto found = works_.find(result.storage().unsafeGetStorageImpl());
    if (found == works_.end()) return {};
    Work work = std::move(found->second);
    works_.erase(found);
    return work;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<c10::StorageImpl*, Work> works_;
};

Unfinished& unfinished() {
  // Never freed: a work that is never waited for logs a warning, and the log may be gone when static objects
  // are destroyed.
  static Unfinished& instance = *new Unfinished;
  return instance;
}

Ints with_rows(const Tensor& input, std::int64_t rows) {
  Ints sizes = input.sizes().vec();
  sizes.at(0) = rows;
  return sizes;
}

void require_rows(const Tensor& input, const char* operation) {
  if (input.dim() == 0)
    throw ValueError(
        fmt::format("{}: a 0-dim tensor cannot be split or joined; add a dim with unsqueeze(0)", operation));
}

std::int64_t rows_per_member(const Tensor& input, std::int64_t size) {
  require_rows(input, "reduce_scatter_tensor");
  if (size < 1 || input.size(0) % size != 0)
    throw ValueError(describe("reduce_scatter_tensor: rows of input", fmt::format("{}", input.size(0)),
                              fmt::format("a multiple of the group's size {}", size)));
  return input.size(0) / size;
}

std::int64_t sum_of(const Ints& values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

// ---------------------------------------------------------------------- kernels that communicate (CPU, CUDA)

Tensor all_reduce_kernel(const Tensor& input, std::string op, std::string group) {
  Tensor output = input.contiguous().clone();
  unfinished().put(output, find_group(group).all_reduce(output, parse_reduce_op(op),
                                                        {.label = "operator", .timeout = {}}));
  return output;
}

Tensor all_gather_kernel(const Tensor& input, std::int64_t size, std::string group) {
  require_rows(input, "all_gather_into_tensor");
  Tensor output = at::empty(with_rows(input, input.size(0) * size), input.options());
  unfinished().put(output, find_group(group).all_gather(output, input, {.label = "operator", .timeout = {}}));
  return output;
}

Tensor reduce_scatter_kernel(const Tensor& input, std::string op, std::int64_t size, std::string group) {
  Tensor output = at::empty(with_rows(input, rows_per_member(input, size)), input.options());
  unfinished().put(output, find_group(group).reduce_scatter(output, input, parse_reduce_op(op),
                                                            {.label = "operator", .timeout = {}}));
  return output;
}

Tensor all_to_all_kernel(const Tensor& input, Ints output_splits, Ints input_splits, std::string group) {
  require_rows(input, "all_to_all_single");
  Tensor output = at::empty(with_rows(input, output_splits.empty() ? input.size(0) : sum_of(output_splits)),
                            input.options());
  unfinished().put(output, find_group(group).all_to_all(output, input, output_splits, input_splits,
                                                        {.label = "operator", .timeout = {}}));
  return output;
}

// Splits a flat tensor into parts, one for each member.
std::vector<Tensor> flat_parts(const Tensor& flat, const Ints& counts) {
  std::vector<Tensor> parts;
  std::int64_t next = 0;
  for (const std::int64_t count : counts) {
    parts.push_back(flat.narrow(0, next, count));
    next += count;
  }
  return parts;
}

void require_flat(const Tensor& input, std::int64_t elements, const char* operation) {
  if (input.dim() != 1 || input.size(0) != elements)
    throw ValueError(describe(fmt::format("{}: input", operation),
                              fmt::format("{} elements in {} dims", input.numel(), input.dim()),
                              fmt::format("{} elements in one dim, the sum of the counts", elements),
                              "flatten it, and pass the counts of all members"));
}

Tensor all_gather_flat_kernel(const Tensor& input, Ints counts, std::string group) {
  const Group members = find_group(group);
  require_flat(input, counts.at(static_cast<std::size_t>(members.axis_rank())), "all_gather_flat");
  Tensor output = at::empty({sum_of(counts)}, input.options());
  unfinished().put(output, members.all_gather_uneven(flat_parts(output, counts), input.contiguous(),
                                                     {.label = "operator", .timeout = {}}));
  return output;
}

Tensor reduce_scatter_flat_kernel(const Tensor& input, std::string op, Ints counts, std::int64_t position,
                                  std::string group) {
  require_flat(input, sum_of(counts), "reduce_scatter_flat");
  Tensor output = at::empty({counts.at(static_cast<std::size_t>(position))}, input.options());
  unfinished().put(output, find_group(group).reduce_scatter_uneven(
                               output, flat_parts(input.contiguous(), counts), parse_reduce_op(op),
                               {.label = "operator", .timeout = {}}));
  return output;
}

Tensor broadcast_kernel(const Tensor& input, std::int64_t source, std::string group) {
  Tensor output = input.contiguous().clone();
  unfinished().put(output, find_group(group).broadcast(output, static_cast<int>(source),
                                                       {.label = "operator", .timeout = {}}));
  return output;
}

Tensor wait_kernel(const Tensor& input) {
  unfinished().take(input).wait();
  return input;
}

// --------------------------------------------------------------------------------- shape-only kernels (Meta)

Tensor same_shape_meta(const Tensor& input) { return at::empty(input.sizes(), input.options()); }
Tensor all_reduce_meta(const Tensor& input, std::string, std::string) { return same_shape_meta(input); }
Tensor all_gather_meta(const Tensor& input, std::int64_t size, std::string) {
  require_rows(input, "all_gather_into_tensor");
  return at::empty(with_rows(input, input.size(0) * size), input.options());
}
Tensor reduce_scatter_meta(const Tensor& input, std::string, std::int64_t size, std::string) {
  return at::empty(with_rows(input, rows_per_member(input, size)), input.options());
}
Tensor all_to_all_meta(const Tensor& input, Ints output_splits, Ints, std::string) {
  require_rows(input, "all_to_all_single");
  return at::empty(with_rows(input, output_splits.empty() ? input.size(0) : sum_of(output_splits)),
                   input.options());
}
Tensor all_gather_flat_meta(const Tensor& input, Ints counts, std::string) {
  return at::empty({sum_of(counts)}, input.options());
}
Tensor reduce_scatter_flat_meta(const Tensor& input, std::string, Ints counts, std::int64_t position,
                                std::string) {
  require_flat(input, sum_of(counts), "reduce_scatter_flat");
  return at::empty({counts.at(static_cast<std::size_t>(position))}, input.options());
}
Tensor broadcast_meta(const Tensor& input, std::int64_t, std::string) { return same_shape_meta(input); }
Tensor wait_meta(const Tensor& input) { return input; }

// --------------------------------------------------------------------------------------------- typed callers

template <class Signature>
auto find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

Tensor call_all_reduce(const Tensor& input, const std::string& op, const std::string& group) {
  static const auto handle = find_operator<decltype(all_reduce_kernel)>("penstock::all_reduce");
  return handle.call(input, op, group);
}
Tensor call_all_gather(const Tensor& input, std::int64_t size, const std::string& group) {
  static const auto handle = find_operator<decltype(all_gather_kernel)>("penstock::all_gather_into_tensor");
  return handle.call(input, size, group);
}
Tensor call_reduce_scatter(const Tensor& input, const std::string& op, std::int64_t size,
                           const std::string& group) {
  static const auto handle =
      find_operator<decltype(reduce_scatter_kernel)>("penstock::reduce_scatter_tensor");
  return handle.call(input, op, size, group);
}
Tensor call_all_to_all(const Tensor& input, const Ints& output_splits, const Ints& input_splits,
                       const std::string& group) {
  static const auto handle = find_operator<decltype(all_to_all_kernel)>("penstock::all_to_all_single");
  return handle.call(input, output_splits, input_splits, group);
}
Tensor call_all_gather_flat(const Tensor& input, const Ints& counts, const std::string& group) {
  static const auto handle = find_operator<decltype(all_gather_flat_kernel)>("penstock::all_gather_flat");
  return handle.call(input, counts, group);
}
Tensor call_reduce_scatter_flat(const Tensor& input, const std::string& op, const Ints& counts,
                                std::int64_t position, const std::string& group) {
  static const auto handle =
      find_operator<decltype(reduce_scatter_flat_kernel)>("penstock::reduce_scatter_flat");
  return handle.call(input, op, counts, position, group);
}
Tensor call_broadcast(const Tensor& input, std::int64_t source, const std::string& group) {
  static const auto handle = find_operator<decltype(broadcast_kernel)>("penstock::broadcast");
  return handle.call(input, source, group);
}
Tensor call_wait(const Tensor& input) {
  static const auto handle = find_operator<decltype(wait_kernel)>("penstock::wait_tensor");
  return handle.call(input);
}

// ----------------------------------------------------------------------------------------- overlapped units

class EndExchange {
 public:
  explicit EndExchange(UnitHalf& half) : half_(half) {}
  ~EndExchange() { half_.end_exchange(); }
  EndExchange(const EndExchange&) = delete;
  EndExchange& operator=(const EndExchange&) = delete;

 private:
  UnitHalf& half_;
};

Tensor wait_as_half(const Tensor& result) {
  const std::shared_ptr<UnitHalf> half = UnitHalf::current();
  if (half == nullptr) return call_wait(result);
  try {
    half->begin_exchange();
  } catch (...) {
    // Nobody will wait for it. The group takes over its memory.
    static_cast<void>(unfinished().take(result));
    throw;
  }
  const EndExchange end(*half);
  return call_wait(result);
}

// ----------------------------------------------------------------------------------------------- derivatives

struct AllReduceFunction : torch::autograd::Function<AllReduceFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& input, std::string op, std::string group) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->saved_data["op"] = op;
    context->saved_data["group"] = group;
    return call_all_reduce(input, op, group);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const std::string op = context->saved_data["op"].toStringRef();
    if (op != "sum" && op != "avg")
      throw NotImplemented(fmt::format(
          "penstock::all_reduce with {} has no derivative; use sum or avg where gradients are needed", op));
    return {call_wait(call_all_reduce(gradients[0], op, context->saved_data["group"].toStringRef())),
            Tensor(), Tensor()};
  }
};

struct AllGatherFunction : torch::autograd::Function<AllGatherFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& input, std::int64_t size, std::string group) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->saved_data["size"] = size;
    context->saved_data["group"] = group;
    return call_all_gather(input, size, group);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {call_wait(call_reduce_scatter(gradients[0], "sum", context->saved_data["size"].toInt(),
                                          context->saved_data["group"].toStringRef())),
            Tensor(), Tensor()};
  }
};

struct ReduceScatterFunction : torch::autograd::Function<ReduceScatterFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& input, std::string op, std::int64_t size,
                        std::string group) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->saved_data["op"] = op;
    context->saved_data["size"] = size;
    context->saved_data["group"] = group;
    return call_reduce_scatter(input, op, size, group);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const std::string op = context->saved_data["op"].toStringRef();
    if (op != "sum" && op != "avg")
      throw NotImplemented(
          fmt::format("penstock::reduce_scatter_tensor with {} has no derivative; use sum or avg where "
                      "gradients are needed",
                      op));
    const std::int64_t size = context->saved_data["size"].toInt();
    Tensor gradient =
        call_wait(call_all_gather(gradients[0], size, context->saved_data["group"].toStringRef()));
    if (op == "avg") gradient = gradient / static_cast<double>(size);
    return {gradient, Tensor(), Tensor(), Tensor()};
  }
};

struct AllToAllFunction : torch::autograd::Function<AllToAllFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& input, Ints output_splits, Ints input_splits,
                        std::string group) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->saved_data["output_splits"] = output_splits;
    context->saved_data["input_splits"] = input_splits;
    context->saved_data["group"] = group;
    return call_all_to_all(input, output_splits, input_splits, group);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {wait_as_half(call_all_to_all(gradients[0], context->saved_data["input_splits"].toIntVector(),
                                         context->saved_data["output_splits"].toIntVector(),
                                         context->saved_data["group"].toStringRef())),
            Tensor(), Tensor(), Tensor()};
  }
};

struct AllGatherFlatFunction : torch::autograd::Function<AllGatherFlatFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& input, Ints counts, std::string group) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->saved_data["counts"] = counts;
    context->saved_data["group"] = group;
    return call_all_gather_flat(input, counts, group);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const std::string group = context->saved_data["group"].toStringRef();
    return {call_wait(call_reduce_scatter_flat(gradients[0].contiguous(), "sum",
                                               context->saved_data["counts"].toIntVector(),
                                               find_group(group).axis_rank(), group)),
            Tensor(), Tensor()};
  }
};

struct ReduceScatterFlatFunction : torch::autograd::Function<ReduceScatterFlatFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& input, std::string op, Ints counts,
                        std::int64_t position, std::string group) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->saved_data["op"] = op;
    context->saved_data["counts"] = counts;
    context->saved_data["group"] = group;
    return call_reduce_scatter_flat(input, op, counts, position, group);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const std::string op = context->saved_data["op"].toStringRef();
    if (op != "sum" && op != "avg")
      throw NotImplemented(
          fmt::format("penstock::reduce_scatter_flat with {} has no derivative; use sum or avg where "
                      "gradients are needed",
                      op));
    const Ints counts = context->saved_data["counts"].toIntVector();
    Tensor gradient = call_wait(
        call_all_gather_flat(gradients[0].contiguous(), counts, context->saved_data["group"].toStringRef()));
    if (op == "avg") gradient = gradient / static_cast<double>(counts.size());
    return {gradient, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

struct BroadcastFunction : torch::autograd::Function<BroadcastFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& input, std::int64_t source,
                        std::string group) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->saved_data["source"] = source;
    context->saved_data["group"] = group;
    return call_broadcast(input, source, group);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const std::string group = context->saved_data["group"].toStringRef();
    const Tensor sum = call_wait(call_all_reduce(gradients[0], "sum", group));
    const Group members = find_group(group);
    const bool source = members.rank_at(members.axis_rank()) == context->saved_data["source"].toInt();
    return {source ? sum : at::zeros_like(sum), Tensor(), Tensor()};
  }
};

struct WaitFunction : torch::autograd::Function<WaitFunction> {
  static Tensor forward(AutogradContext*, const Tensor& input) {
    at::AutoDispatchBelowADInplaceOrView below;
    return call_wait(input);
  }
  static variable_list backward(AutogradContext*, variable_list gradients) { return {gradients[0]}; }
};

Tensor all_reduce_autograd(const Tensor& input, std::string op, std::string group) {
  return AllReduceFunction::apply(input, op, group);
}
Tensor all_gather_autograd(const Tensor& input, std::int64_t size, std::string group) {
  return AllGatherFunction::apply(input, size, group);
}
Tensor reduce_scatter_autograd(const Tensor& input, std::string op, std::int64_t size, std::string group) {
  return ReduceScatterFunction::apply(input, op, size, group);
}
Tensor all_to_all_autograd(const Tensor& input, Ints output_splits, Ints input_splits, std::string group) {
  return AllToAllFunction::apply(input, output_splits, input_splits, group);
}
Tensor all_gather_flat_autograd(const Tensor& input, Ints counts, std::string group) {
  return AllGatherFlatFunction::apply(input, counts, group);
}
Tensor reduce_scatter_flat_autograd(const Tensor& input, std::string op, Ints counts, std::int64_t position,
                                    std::string group) {
  return ReduceScatterFlatFunction::apply(input, op, counts, position, group);
}
Tensor broadcast_autograd(const Tensor& input, std::int64_t source, std::string group) {
  return BroadcastFunction::apply(input, source, group);
}
Tensor wait_autograd(const Tensor& input) { return WaitFunction::apply(input); }

void register_communicating(torch::Library& library) {
  library.impl("all_reduce", all_reduce_kernel);
  library.impl("all_gather_into_tensor", all_gather_kernel);
  library.impl("reduce_scatter_tensor", reduce_scatter_kernel);
  library.impl("all_to_all_single", all_to_all_kernel);
  library.impl("all_gather_flat", all_gather_flat_kernel);
  library.impl("reduce_scatter_flat", reduce_scatter_flat_kernel);
  library.impl("broadcast", broadcast_kernel);
  library.impl("wait_tensor", wait_kernel);
}

}  // namespace

TORCH_LIBRARY(penstock, library) {
  library.def("all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor");
  library.def("all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor");
  library.def("reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, str group_name) -> Tensor");
  library.def(
      "all_to_all_single(Tensor input, int[] output_splits, int[] input_splits, str group_name) -> Tensor");
  library.def("all_gather_flat(Tensor input, int[] counts, str group_name) -> Tensor");
  library.def(
      "reduce_scatter_flat(Tensor input, str reduce_op, int[] counts, int position, str group_name) -> "
      "Tensor");
  library.def("broadcast(Tensor input, int source, str group_name) -> Tensor");
  library.def("wait_tensor(Tensor(a) input) -> Tensor(a)");
}

TORCH_LIBRARY_IMPL(penstock, CPU, library) { register_communicating(library); }
TORCH_LIBRARY_IMPL(penstock, CUDA, library) { register_communicating(library); }

TORCH_LIBRARY_IMPL(penstock, Meta, library) {
  library.impl("all_reduce", all_reduce_meta);
  library.impl("all_gather_into_tensor", all_gather_meta);
  library.impl("reduce_scatter_tensor", reduce_scatter_meta);
  library.impl("all_to_all_single", all_to_all_meta);
  library.impl("all_gather_flat", all_gather_flat_meta);
  library.impl("reduce_scatter_flat", reduce_scatter_flat_meta);
  library.impl("broadcast", broadcast_meta);
  library.impl("wait_tensor", wait_meta);
}

TORCH_LIBRARY_IMPL(penstock, Autograd, library) {
  library.impl("all_reduce", all_reduce_autograd);
  library.impl("all_gather_into_tensor", all_gather_autograd);
  library.impl("reduce_scatter_tensor", reduce_scatter_autograd);
  library.impl("all_to_all_single", all_to_all_autograd);
  library.impl("all_gather_flat", all_gather_flat_autograd);
  library.impl("reduce_scatter_flat", reduce_scatter_flat_autograd);
  library.impl("broadcast", broadcast_autograd);
  library.impl("wait_tensor", wait_autograd);
}

void register_operators() {}

namespace functional {

Tensor all_reduce(const Tensor& input, ReduceOp op, const Group& group) {
  return call_all_reduce(input, to_string(op), group.name());
}
Tensor all_gather(const Tensor& input, const Group& group) {
  return call_all_gather(input, group.size(), group.name());
}
Tensor reduce_scatter(const Tensor& input, ReduceOp op, const Group& group) {
  return call_reduce_scatter(input, to_string(op), group.size(), group.name());
}
Tensor all_gather_flat(const Tensor& input, const std::vector<std::int64_t>& counts, const Group& group) {
  return call_all_gather_flat(input, counts, group.name());
}
Tensor reduce_scatter_flat(const Tensor& input, ReduceOp op, const std::vector<std::int64_t>& counts,
                           const Group& group) {
  return call_reduce_scatter_flat(input, to_string(op), counts, group.axis_rank(), group.name());
}
Tensor all_to_all(const Tensor& input, const std::vector<std::int64_t>& output_splits,
                  const std::vector<std::int64_t>& input_splits, const Group& group) {
  return call_all_to_all(input, output_splits, input_splits, group.name());
}
Tensor broadcast(const Tensor& input, int source, const Group& group) {
  return call_broadcast(input, source, group.name());
}
Tensor wait_tensor(const Tensor& input) { return call_wait(input); }
Tensor wait_in_turn(const Tensor& input) { return wait_as_half(input); }

}  // namespace functional

}  // namespace penstock::comm
