#include "penstock/pipeline/traced/trace_variant.h"

#include <fmt/format.h>

#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/graph/run/leaf_values.h"
#include "penstock/step_context.h"
#include "penstock/torch/fake/fake_watch.h"

namespace penstock {

using graph::Values;

namespace {

std::string prefix_of(const StageModule& module, std::size_t root) {
  return module.modules().size() > 1 ? std::to_string(root) : std::string();
}

std::string path_below(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

template <class Visit>
void for_each_named_tensor(const StageModule& module, const Visit& visit) {
  for (const bool parameters : {true, false})
    for (std::size_t i = 0; i < module.modules().size(); ++i) {
      const torch::nn::Module& root = *module.modules()[i];
      for (const auto& item : parameters ? root.named_parameters() : root.named_buffers())
        if (item.value().defined())
          visit(path_below(prefix_of(module, i), item.key()), item.value(), parameters);
    }
}

// The context of a forward that will run in other steps.
StepContext traced_context() {
  StepContext context = *StepContext::current();
  context.running = true;
  if (!context.microbatch) context.microbatch = 0;
  context.captured = true;
  return context;
}

}  // namespace

std::vector<std::shared_ptr<torch::nn::Module>> modules_of(const StageModule& module) {
  std::vector<std::shared_ptr<torch::nn::Module>> found;
  for (const auto& root : module.modules())
    for (const auto& each : root->modules(true)) found.push_back(each);
  return found;
}

void collect_model(const StageModule& module, PipeState& pipe) {
  if (module.modules().size() > 1) pipe.modules.push_back({"", "Modules", true});
  for (std::size_t i = 0; i < module.modules().size(); ++i)
    for (const auto& item : module.modules()[i]->named_modules(prefix_of(module, i), true))
      pipe.modules.push_back({item.key(), item.value()->name(), item.value()->is_training()});
  if (pipe.modules.empty()) pipe.modules.push_back({"", "Function", true});
  std::set<const c10::TensorImpl*> known;
  for_each_named_tensor(module, [&](const std::string& name, const at::Tensor& tensor, bool is_parameter) {
    if (!known.insert(tensor.unsafeGetTensorImpl()).second) return;
    pipe.names.push_back(name);
    pipe.tensors.push_back(tensor);
    if (is_parameter) pipe.parameters = pipe.tensors.size();
  });
}

TensorAliases aliases_of(const StageModule& module, const PipeState& pipe) {
  std::unordered_map<const c10::TensorImpl*, std::size_t> index;
  for (std::size_t i = 0; i < pipe.tensors.size(); ++i)
    index.emplace(pipe.tensors[i].unsafeGetTensorImpl(), i);
  TensorAliases all;
  for_each_named_tensor(module, [&](const std::string& name, const at::Tensor& tensor, bool) {
    all[index.at(tensor.unsafeGetTensorImpl())].push_back(name);
  });
  for (auto entry = all.begin(); entry != all.end();)
    entry = entry->second.size() > 1 ? std::next(entry) : all.erase(entry);
  return all;
}

PipeVariant trace_variant(const StageModule& module, const PipeState& pipe, const TensorAliases& aliases,
                          const PipeExample& example, at::Device device) {
  PipeVariant variant;
  const FlatTree args = flatten_tree(example.args), kwargs = flatten_tree(example.kwargs);
  variant.args = args.spec;
  variant.kwargs = kwargs.spec;
  std::vector<Tree> leaves = args.leaves;
  leaves.insert(leaves.end(), kwargs.leaves.begin(), kwargs.leaves.end());
  Values inputs(pipe.tensors.begin(), pipe.tensors.end());
  for (c10::IValue& leaf : graph::values_of_leaves(leaves)) inputs.push_back(std::move(leaf));
  graph::TraceSettings settings{.roots = module.modules(),
                                .names = pipe.names,
                                .found = pipe.tensors.size(),
                                .aliases = aliases,
                                .device = device};
  for (std::string& path : args.spec.leaf_paths("args")) settings.names.push_back(std::move(path));
  for (std::string& path : kwargs.spec.leaf_paths("kwargs")) settings.names.push_back(std::move(path));
  const graph::Function function = [&](const Values& given) -> Values {
    const StepGuard step(traced_context());
    std::vector<Tree> all = graph::leaves_of_values(std::span(given).subspan(pipe.tensors.size()));
    const auto middle = all.begin() + static_cast<std::ptrdiff_t>(args.spec.leaf_count());
    const Tree result = module.forward(unflatten_tree({all.begin(), middle}, args.spec),
                                       unflatten_tree({middle, all.end()}, kwargs.spec));
    FlatTree flat = flatten_tree(result);
    variant.result = flat.spec;
    return graph::values_of_leaves(flat.leaves);
  };
  FakeWatch watch;
  {
    const FakeWatch::Guard watching(watch);
    variant.trace = graph::trace_forward(function, inputs, settings);
  }
  for (const at::Tensor& kept : watch.survivors())
    mark_leftover(
        kept,
        "a module kept it from the trace of its pipeline, which computes nothing; make it before the "
        "trace, or return it");
  if (variant.trace.graph.nodes.empty())
    throw ValueError("trace_pipeline: the forward has no operators, so there is nothing to cut into stages");
  for (std::size_t i = 0; i < variant.trace.graph.inputs.size(); ++i)
    variant.kinds.push_back(i < variant.trace.found                       ? graph::InputKind::State
                            : variant.leaf_of(i) < args.spec.leaf_count() ? graph::InputKind::Positional
                                                                          : graph::InputKind::Keyword);
  for (Tree& leaf : leaves) variant.leaves.push_back(leaf.is_tensor() ? Tree() : std::move(leaf));
  if (module.modules().size() != 1) variant.training.push_back(true);
  for (const auto& each : modules_of(module)) variant.training.push_back(each->is_training());
  return variant;
}

std::vector<std::size_t> matching_places(const graph::ForwardTrace& trace,
                                         const std::vector<std::size_t>& places,
                                         const graph::ForwardTrace& other) {
  const auto key_of = [](const graph::ForwardTrace& of, std::size_t node) {
    return fmt::format("{}|{}", c10::toString(of.graph.nodes[node].op.operator_name()),
                       of.module_of_node[node]);
  };
  std::unordered_map<std::string, std::vector<std::size_t>> others;
  for (std::size_t i = 0; i < other.graph.nodes.size(); ++i) others[key_of(other, i)].push_back(i);
  std::unordered_map<std::string, std::size_t> seen;
  std::vector<std::size_t> found;
  std::size_t next = 0;
  for (std::size_t i = 0; i < trace.graph.nodes.size() && next < places.size(); ++i) {
    const std::string key = key_of(trace, i);
    const std::size_t occurrence = seen[key]++;
    if (i < places[next]) continue;
    // A place before an operator that the other trace lacks (a dropout) is before the next one that it has.
    const auto same = others.find(key);
    if (same == others.end() || occurrence >= same->second.size()) continue;
    found.push_back(same->second[occurrence]);
    ++next;
  }
  if (found.size() < places.size())
    throw ValueError(
        fmt::format("trace_pipeline: the forward of another example or mode has no operator after '{}', "
                    "where stage {} begins; "
                    "let the forward run the same modules in all of them, or leave the example out",
                    trace.line(places[found.size()]), found.size() + 1));
  return found;
}

std::string difference(const PipeVariant& expected, const PipeVariant& actual) {
  const std::vector<graph::Hop>&wanted = expected.cut.hops, &hops = actual.cut.hops;
  if (wanted.size() != hops.size())
    return fmt::format("{} values travel between stages, {} in the first trace", hops.size(), wanted.size());
  for (std::size_t i = 0; i < hops.size(); ++i) {
    const graph::Geometry &a = expected.geometry(wanted[i].value), &b = actual.geometry(hops[i].value);
    if (wanted[i].from != hops[i].from || wanted[i].to != hops[i].to || a.dtype != b.dtype ||
        a.sizes.size() != b.sizes.size())
      return fmt::format("{} goes from stage {} to stage {}, in the first trace {} from stage {} to stage {}",
                         record_text(b), hops[i].from, hops[i].to, record_text(a), wanted[i].from,
                         wanted[i].to);
  }
  return {};
}

}  // namespace penstock
