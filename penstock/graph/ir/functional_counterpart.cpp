#include <torch/library.h>

#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "penstock/graph/ir/functionalize.h"
#include "penstock/operator_traits.h"

namespace penstock::graph {
namespace {

bool same_type(const c10::Argument& a, const c10::Argument& b) { return *a.type() == *b.type(); }

// The arguments of `op` without those that only receive results.
std::vector<const c10::Argument*> read_arguments(const c10::OperatorHandle& op) {
  const OperatorTraits& traits = traits_of(op);
  std::vector<const c10::Argument*> arguments;
  for (std::size_t i = 0; i < traits.arguments.size(); ++i) {
    const c10::Argument& argument = op.schema().arguments()[i];
    if (!(traits.arguments[i].written && argument.kwarg_only())) arguments.push_back(&argument);
  }
  return arguments;
}

bool fits(const c10::OperatorHandle& candidate, const std::vector<const c10::Argument*>& wanted) {
  const auto& arguments = candidate.schema().arguments();
  if (traits_of(candidate).mutates || arguments.size() != wanted.size()) return false;
  for (std::size_t i = 0; i < wanted.size(); ++i)
    if (!same_type(arguments[i], *wanted[i]) || arguments[i].name() != wanted[i]->name()) return false;
  return true;
}

c10::optional<c10::OperatorHandle> find_sibling(const c10::OperatorHandle& op) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const std::string& name = op.operator_name().name;
  const bool in_place = name.ends_with('_');
  const std::string bare = in_place ? name.substr(0, name.size() - 1) : name;
  const std::string ours = "penstock::" + bare.substr(bare.rfind(':') + 1) + "_functional";
  const std::vector<const c10::Argument*> wanted = read_arguments(op);
  c10::optional<c10::OperatorHandle> found;
  for (const c10::OperatorName& other : dispatcher.getAllOpNames()) {
    // Some counterparts have other names: `normal` draws with tensors of means, `rrelu_with_noise` writes its
    // noise itself; batch norm has only ours, and that of copy_ may return the source itself.
    if (other.name != bare && other.name != bare + "_functional" && other.name != ours) continue;
    if (other == op.operator_name()) continue;  // its schema may hide that it writes
    const auto candidate = dispatcher.findSchema(other);
    if (!candidate || !fits(*candidate, wanted)) continue;
    if (other.name == ours) return candidate;
    if (other.overload_name == op.operator_name().overload_name) return candidate;
    if (!found) found = candidate;
  }
  return found;
}

// The source in new memory, with the layout and dtype of the tensor it would have been copied to.
at::Tensor copy_functional(const at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  return at::empty_like(self).copy_(src, non_blocking);
}

// Batch norm that returns the running statistics it would have written, after its other results. `norm`:
// takes the statistics to write.
template <class Norm>
auto with_statistics(const c10::optional<at::Tensor>& running_mean,
                     const c10::optional<at::Tensor>& running_var, const Norm& norm) {
  const auto copy = [](const c10::optional<at::Tensor>& tensor) {
    return tensor && tensor->defined() ? tensor->clone() : at::Tensor();
  };
  const at::Tensor mean = copy(running_mean), variance = copy(running_var);
  auto results = norm(mean, variance);
  return std::tuple_cat(std::move(results), std::make_tuple(mean, variance));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> native_batch_norm_functional(
    const at::Tensor& input, const c10::optional<at::Tensor>& weight, const c10::optional<at::Tensor>& bias,
    const c10::optional<at::Tensor>& running_mean, const c10::optional<at::Tensor>& running_var,
    bool training, double momentum, double eps) {
  return with_statistics(running_mean, running_var, [&](const at::Tensor& mean, const at::Tensor& variance) {
    return at::native_batch_norm(input, weight, bias, mean, variance, training, momentum, eps);
  });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
cudnn_batch_norm_functional(const at::Tensor& input, const at::Tensor& weight,
                            const c10::optional<at::Tensor>& bias,
                            const c10::optional<at::Tensor>& running_mean,
                            const c10::optional<at::Tensor>& running_var, bool training, double factor,
                            double epsilon) {
  return with_statistics(running_mean, running_var, [&](const at::Tensor& mean, const at::Tensor& variance) {
    return at::cudnn_batch_norm(input, weight, bias, mean, variance, training, factor, epsilon);
  });
}

}  // namespace

c10::optional<c10::OperatorHandle> functional_counterpart(const c10::OperatorHandle& op) {
  static std::mutex& mutex = *new std::mutex;
  static auto& known = *new std::unordered_map<std::string, c10::optional<c10::OperatorHandle>>;
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = known.try_emplace(traits_of(op).name);
  if (is_new) entry->second = find_sibling(op);
  return entry->second;
}

TORCH_LIBRARY_FRAGMENT(penstock, library) {
  library.def("copy_functional(Tensor self, Tensor src, bool non_blocking=False) -> Tensor");
  library.def(
      "native_batch_norm_functional(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, "
      "Tensor? running_var, bool training, "
      "float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "cudnn_batch_norm_functional(Tensor input, Tensor weight, Tensor? bias, Tensor? running_mean, Tensor? "
      "running_var, bool training, "
      "float exponential_average_factor, float epsilon) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, library) {
  library.impl("copy_functional", &copy_functional);
  library.impl("native_batch_norm_functional", &native_batch_norm_functional);
  library.impl("cudnn_batch_norm_functional", &cudnn_batch_norm_functional);
}

}  // namespace penstock::graph
