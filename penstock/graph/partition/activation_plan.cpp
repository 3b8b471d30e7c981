#include "penstock/graph/partition/activation_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <set>
#include <utility>

#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/graph/ir/memory_groups.h"
#include "penstock/graph/partition/node_modules.h"
#include "penstock/graph/partition/operator_cost.h"
#include "penstock/graph/saving/activation_budget.h"
#include "penstock/graph/saving/activation_policy.h"
#include "penstock/graph/saving/choose_saved.h"

namespace penstock::graph {
namespace {

constexpr std::size_t kNoItem = static_cast<std::size_t>(-1);

// The joint graph as a problem without tensors: groups of memory are its items, nodes of forward its works.
class ActivationProblem {
 public:
  ActivationProblem(const JointGraph& joint, const detail::ForwardBackwardSplit& halves,
                    const ActivationPolicy& policy)
      : graph_(joint.graph),
        halves_(halves),
        groups_(joint.graph),
        modules_(modules_of_nodes(joint)),
        item_of_group_(groups_.count(), kNoItem) {
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i)
      if (halves.in_forward[i]) add_work(i, policy);
    const std::vector<char> used = detail::used_by_backward(joint, halves);
    for (std::size_t i = 0; i < used.size(); ++i)
      if (const std::size_t item = item_of(ValueId{static_cast<std::int32_t>(i)}); used[i] && item != kNoItem)
        problem_.items[item].used = true;
  }

  const SavingProblem& problem() const { return problem_; }
  const std::vector<std::string>& modules() const { return modules_; }

  // By value: forward's values whose memory is saved, or at hand.
  std::vector<char> saved_values(const SavingChoice& choice) const {
    std::vector<char> saved(graph_.values.size(), 0);
    for (std::size_t i = 0; i < saved.size(); ++i) {
      if (!halves_.from_forward[i]) continue;
      const std::size_t item = item_of(ValueId{static_cast<std::int32_t>(i)});
      saved[i] = item == kNoItem || choice.saved[item];
    }
    return saved;
  }

  std::vector<Activation> activations(const SavingChoice& choice) const {
    std::vector<Activation> all;
    for (std::size_t i = 0; i < problem_.items.size(); ++i) {
      const SavingProblem::Item& item = problem_.items[i];
      if (!choice.saved[i] && !choice.repeated[item.maker]) continue;
      const Node& node = graph_.nodes[nodes_[item.maker]];
      Activation& activation = all.emplace_back();
      activation.value = values_[i];
      activation.bytes = item.bytes;
      activation.cost = problem_.works[item.maker].cost;
      activation.op = node.op.operator_name().name;
      activation.module = modules_[nodes_[item.maker]];
      activation.fate = choice.saved[i] ? Activation::Fate::Saved : Activation::Fate::Recomputed;
      activation.reason = reasons_[item.maker];
    }
    return all;
  }

 private:
  std::size_t item_of(ValueId value) const { return item_of_group_[groups_.of(value)]; }

  void add_work(std::size_t index, const ActivationPolicy& policy) {
    const Node& node = graph_.nodes[index];
    std::set<std::size_t> read;
    for_each_value(node.arguments, [&](ValueId value) {
      if (const std::size_t item = item_of(value); item != kNoItem) read.insert(item);
    });
    // Does a node add to memory that another one has made? A view does not, unless it has an effect, as the
    // wait for a collective: that memory is then never made again.
    bool is_work = false, shares = false;
    std::set<std::size_t> made;
    for_each_value(node.results, [&](ValueId value) {
      const std::size_t group = groups_.of(value);
      if (groups_.is_given(group)) return;
      if (item_of_group_[group] == kNoItem)
        is_work |= made.insert(group).second;
      else
        shares |= !only_views(node) || must_run(node);
    });
    if (shares)
      for_each_value(node.results, [&](ValueId value) {
        if (const std::size_t item = item_of(value); item != kNoItem) never_again(problem_.items[item].maker);
      });
    if (!is_work) return;
    const std::size_t work = problem_.works.size();
    problem_.works.push_back({.cost = std::max<std::int64_t>(1, cost_of_node(graph_, node)),
                              .rule = policy.rule_of(modules_[index]),
                              .needs = {read.begin(), read.end()}});
    reasons_.push_back(problem_.works[work].rule == SavingRule::Free ? Activation::Reason::Choice
                                                                     : Activation::Reason::Policy);
    nodes_.push_back(index);
    if (shares || must_run(node)) never_again(work);
    for_each_value(node.results, [&](ValueId value) {
      const std::size_t group = groups_.of(value);
      if (!made.contains(group) || item_of_group_[group] != kNoItem) return;
      item_of_group_[group] = problem_.items.size();
      problem_.items.push_back({.bytes = groups_.bytes(group), .maker = work});
      values_.push_back(value);
    });
  }

  void never_again(std::size_t work) {
    problem_.works[work].rule = SavingRule::Save;
    reasons_[work] = Activation::Reason::RunsOnce;
  }

  const Graph& graph_;
  const detail::ForwardBackwardSplit& halves_;
  const MemoryGroups groups_;
  const std::vector<std::string> modules_;  // by node
  SavingProblem problem_;
  std::vector<std::size_t> item_of_group_;
  std::vector<ValueId> values_;              // by item
  std::vector<std::size_t> nodes_;           // by work
  std::vector<Activation::Reason> reasons_;  // by work
};

[[noreturn]] void refuse_budget(const ActivationBudget& budget, std::int64_t bytes, std::int64_t all,
                                std::vector<Activation> held, std::int64_t least) {
  std::erase_if(held, [](const Activation& each) { return each.fate != Activation::Fate::Saved; });
  std::stable_sort(held.begin(), held.end(),
                   [](const Activation& a, const Activation& b) { return a.bytes > b.bytes; });
  constexpr std::size_t kShown = 4;
  std::string tensors;
  for (std::size_t i = 0; i < std::min(kShown, held.size()); ++i)
    tensors += (i == 0 ? "" : ", ") + to_text(held[i]);
  if (held.size() > kShown) tensors += fmt::format(" and {} more", held.size() - kShown);
  // Rounded up: what is recommended must fit.
  const double fraction = std::min(1.0, std::ceil(1000 * static_cast<double>(least) /
                                                  static_cast<double>(std::max<std::int64_t>(1, all))) /
                                            1000);
  throw ValueError(
      fmt::format("graph: the activation budget, {}, is {}, but backward needs at least {}: {}; set the "
                  "budget to \"{} B\" "
                  "or {}, or to 0 for the least of each graph",
                  budget.text(), format_bytes(static_cast<std::uint64_t>(bytes)),
                  format_bytes(static_cast<std::uint64_t>(least)), tensors, least, fraction));
}

}  // namespace

std::string to_text(const Activation& activation) {
  return fmt::format("{}{} ({}{})", activation.op,
                     activation.module.empty() ? "" : " in " + activation.module,
                     format_bytes(static_cast<std::uint64_t>(activation.bytes)),
                     activation.reason == Activation::Reason::RunsOnce ? ", must run once"
                     : activation.reason == Activation::Reason::Policy ? ", by activation_policy"
                                                                       : "");
}

ActivationPlan plan_activations(const JointGraph& joint, const ActivationOptions& options) {
  const ActivationBudget budget = parse_activation_budget(options.budget, "graph: activations.budget");
  const ActivationPolicy policy = parse_activation_policy(options.policy, "graph: activations.policy");
  const detail::ForwardBackwardSplit halves = detail::forward_backward_split(joint);
  const ActivationProblem problem(joint, halves, policy);
  if (!options.part_of_model)
    if (const std::string unmatched = policy.unmatched(problem.modules(), "graph: activations.policy");
        !unmatched.empty())
      throw ValueError(unmatched);
  const SavingChoice least = least_saved(problem.problem());
  ActivationPlan plan;
  SavingProblem without_rules = problem.problem();
  for (SavingProblem::Work& work : without_rules.works) work.rule = SavingRule::Save;
  plan.all_bytes = save_all(without_rules).bytes;
  plan.least_bytes = least.bytes;
  plan.budget_bytes = budget.bytes_of(plan.all_bytes, plan.least_bytes);
  // A rule may ask for more than the budget says only if the budget is that of saving all.
  if (budget.saves_all()) plan.budget_bytes = std::max(plan.budget_bytes, save_all(problem.problem()).bytes);
  const std::optional<SavingChoice> choice = choose_saved(problem.problem(), plan.budget_bytes);
  if (!choice)
    refuse_budget(budget, plan.budget_bytes, plan.all_bytes, problem.activations(least), plan.least_bytes);
  plan.activations = problem.activations(*choice);
  plan.bytes = choice->bytes;
  plan.cost = choice->cost;
  plan.gap = choice->gap();
  for (std::size_t i = 0; i < joint.graph.nodes.size(); ++i)
    if (halves.in_forward[i]) plan.forward_cost += cost_of_node(joint.graph, joint.graph.nodes[i]);
  plan.halves = detail::split(joint, halves, problem.saved_values(*choice), &plan.origin);
  return plan;
}

}  // namespace penstock::graph
