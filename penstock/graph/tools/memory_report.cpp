#include "penstock/graph/tools/memory_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/graph/partition/node_modules.h"

namespace penstock::graph {
namespace {

std::string bytes_text(std::int64_t bytes) { return format_bytes(static_cast<std::uint64_t>(bytes)); }

double percent(std::int64_t part, std::int64_t whole) {
  return whole > 0 ? 100 * static_cast<double>(part) / static_cast<double>(whole) : 0;
}

// "blocks.3.feed" as "blocks.*.feed": equal blocks are one row.
std::string without_numbers(const std::string& path) {
  std::string text;
  for (std::size_t begin = 0; begin < path.size();) {
    const std::size_t end = std::min(path.find('.', begin), path.size());
    const std::string component = path.substr(begin, end - begin);
    const bool is_number =
        std::all_of(component.begin(), component.end(), [](char c) { return c >= '0' && c <= '9'; });
    text += (begin == 0 ? "" : ".") + (is_number ? std::string("*") : component);
    begin = end + 1;
  }
  return text;
}

// Rows of cells, the first of them the head; numbers are on the right of their columns.
std::string table_of(const std::vector<std::vector<std::string>>& rows, std::size_t texts) {
  std::vector<std::size_t> width(rows.front().size(), 0);
  for (const auto& row : rows)
    for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  std::string text;
  for (const auto& row : rows) {
    std::string line = " ";
    for (std::size_t i = 0; i < row.size(); ++i)
      line +=
          i < texts ? fmt::format(" {:<{}} ", row[i], width[i]) : fmt::format(" {:>{}} ", row[i], width[i]);
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

}  // namespace

std::string_view to_text(StepTensor::Kind kind) {
  switch (kind) {
    case StepTensor::Kind::Temporary:
      return "temporary";
    case StepTensor::Kind::Saved:
      return "saved";
    case StepTensor::Kind::Recomputed:
      return "recomputed";
    case StepTensor::Kind::Gradient:
      return "gradient";
    case StepTensor::Kind::Given:
      return "gradient of a result";
  }
  return "temporary";
}

ActivationReport::ActivationReport(const JointGraph& joint, const ActivationOptions& options)
    : joint_(joint),
      plan_(plan_activations(joint, options)),
      step_(memory_of_step(joint, plan_)),
      modules_(modules_of_nodes(joint)),
      maker_(joint.graph.values.size(), joint.graph.nodes.size()) {
  peak_of_saving_all_ =
      options.decide() ? memory_of_step(joint, plan_activations(joint, {})).peak_bytes() : step_.peak_bytes();
  for (std::size_t i = 0; i < joint.graph.nodes.size(); ++i)
    for_each_value(joint.graph.nodes[i].results, [&](ValueId value) { maker_[index_of(value)] = i; });
}

std::string ActivationReport::name_of(const StepTensor& tensor) const {
  const std::size_t node = maker_[index_of(tensor.value)];
  if (node == joint_.graph.nodes.size()) {
    for (const Placeholder& input : joint_.graph.inputs)
      if (input.value == tensor.value) return input.name;
    return "an input";
  }
  const Node& made_by = joint_.graph.nodes[node];
  return made_by.op.operator_name().name + (modules_[node].empty() ? "" : " in " + modules_[node]) +
         (made_by.phase == Phase::Backward ? ", in backward" : "");
}

std::string ActivationReport::saving_text() const {
  struct Sum {
    std::int64_t saved = 0, recomputed = 0, cost = 0, tensors = 0;
  };
  std::map<std::pair<std::string, std::string>, Sum> sums;
  std::int64_t recomputed = 0, operators = 0;
  for (const Activation& each : plan_.activations) {
    Sum& sum = sums[{without_numbers(each.module), each.op}];
    ++sum.tensors;
    if (each.fate == Activation::Fate::Saved) {
      sum.saved += each.bytes;
    } else {
      sum.recomputed += each.bytes;
      sum.cost += each.cost;
      recomputed += each.bytes;
    }
  }
  for (const std::size_t node : plan_.origin.backward_nodes)
    operators +=
        std::binary_search(plan_.origin.forward_nodes.begin(), plan_.origin.forward_nodes.end(), node);
  std::string text = fmt::format("saved for backward: {} of {} ({:.1f} %), at least {} are needed\n",
                                 bytes_text(plan_.bytes), bytes_text(plan_.all_bytes),
                                 percent(plan_.bytes, plan_.all_bytes), bytes_text(plan_.least_bytes));
  if (operators > 0)
    text += fmt::format("recomputed in backward: {} by {}, {:.1f} % of the work of forward{}\n",
                        bytes_text(recomputed), count_of(operators, "operator"),
                        percent(plan_.cost, plan_.forward_cost),
                        plan_.gap > 0 ? fmt::format(" (within {:.1f} % of the least)", 100 * plan_.gap) : "");
  else
    text += "recomputed in backward: nothing\n";
  std::vector<std::pair<std::pair<std::string, std::string>, Sum>> sorted(sums.begin(), sums.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    return a.second.saved + a.second.recomputed > b.second.saved + b.second.recomputed;
  });
  std::vector<std::vector<std::string>> rows{
      {"module", "operator", "tensors", "saved", "recomputed", "work again"}};
  for (const auto& [key, sum] : sorted)
    rows.push_back({key.first.empty() ? "-" : key.first, key.second, std::to_string(sum.tensors),
                    sum.saved > 0 ? bytes_text(sum.saved) : "",
                    sum.recomputed > 0 ? bytes_text(sum.recomputed) : "",
                    sum.cost > 0 ? fmt::format("{:.1f} %", percent(sum.cost, plan_.forward_cost)) : ""});
  return text + table_of(rows, 2);
}

std::string ActivationReport::peak_text(std::size_t rows_shown) const {
  const std::size_t at = step_.peak_operator();
  if (step_.live.empty()) return "no operators\n";
  const Node& node = joint_.graph.nodes[step_.nodes[at]];
  const bool in_forward = at < step_.forward_operators;
  std::string text = fmt::format(
      "predicted peak of a call: {}, in {}, at operator {} of {}: {}{}\n", bytes_text(step_.peak_bytes()),
      in_forward ? "forward" : "backward", in_forward ? at : at - step_.forward_operators,
      in_forward ? step_.forward_operators : step_.live.size() - step_.forward_operators,
      node.op.operator_name().name,
      modules_[step_.nodes[at]].empty() ? "" : " in " + modules_[step_.nodes[at]]);
  if (peak_of_saving_all_ != step_.peak_bytes())
    text += fmt::format("if everything were saved: {}; recomputation saves {} of it ({:.1f} %)\n",
                        bytes_text(peak_of_saving_all_),
                        bytes_text(std::max<std::int64_t>(0, peak_of_saving_all_ - step_.peak_bytes())),
                        percent(peak_of_saving_all_ - step_.peak_bytes(), peak_of_saving_all_));
  std::vector<const StepTensor*> live;
  for (const StepTensor& tensor : step_.tensors)
    if (tensor.first <= at && at <= tensor.last) live.push_back(&tensor);
  std::stable_sort(live.begin(), live.end(),
                   [](const StepTensor* a, const StepTensor* b) { return a->bytes > b->bytes; });
  std::vector<std::vector<std::string>> rows{{"live at the peak", "what", "bytes"}};
  for (std::size_t i = 0; i < std::min(rows_shown, live.size()); ++i)
    rows.push_back({name_of(*live[i]), std::string(to_text(live[i]->kind)), bytes_text(live[i]->bytes)});
  text += table_of(rows, 2);
  if (live.size() > rows_shown) {
    std::int64_t others = 0;
    for (std::size_t i = rows_shown; i < live.size(); ++i) others += live[i]->bytes;
    text += fmt::format("  ... {} more, {}\n", live.size() - rows_shown, bytes_text(others));
  }
  return text;
}

}  // namespace penstock::graph
