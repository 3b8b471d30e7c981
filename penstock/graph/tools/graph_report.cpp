#include "penstock/graph/tools/graph_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace penstock::graph {
namespace {

std::size_t bytes_of(const Geometry& geometry) {
  return static_cast<std::size_t>(geometry.numel()) * c10::elementSize(geometry.dtype);
}

std::string in_units(std::size_t bytes) {
  if (bytes < 10'000) return fmt::format("{} B", bytes);
  if (bytes < 10'000'000) return fmt::format("{:.1f} kB", static_cast<double>(bytes) / 1e3);
  return fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6);
}

// Rows of cells, with each column as wide as its widest cell.
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> head) { rows_.push_back(std::move(head)); }
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string write() const {
    std::vector<std::size_t> width(rows_[0].size(), 0);
    for (const auto& row : rows_)
      for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
    std::string text;
    for (const auto& row : rows_) {
      std::string line = " ";
      for (std::size_t i = 0; i < row.size(); ++i)
        line += fmt::format(" {:<{}}", row[i], i + 1 < row.size() ? width[i] + 1 : 0);
      text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    }
    return text;
  }

 private:
  std::vector<std::vector<std::string>> rows_;
};

class GraphReport {
 public:
  GraphReport(const GraphFile& file, const ReportOptions& options)
      : file_(file), graph_(file.joint.graph), options_(options) {}

  std::string write() {
    summary();
    operators();
    inputs();
    results();
    saved();
    nodes();
    return std::move(text_);
  }

 private:
  template <class... Args>
  void print(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(text_), format, std::forward<Args>(args)...);
  }

  void summary() {
    const auto backward = static_cast<std::size_t>(
        std::count_if(graph_.nodes.begin(), graph_.nodes.end(),
                      [](const Node& node) { return node.phase == Phase::Backward; }));
    std::size_t random = 0, saved_bytes = 0, constant_bytes = 0;
    for (const Node& node : graph_.nodes) {
      const auto inside = operator_inside(node.op);
      random += is_random(node) || (inside && inside->kind == StateKind::Generator) ? 1 : 0;
    }
    for (const ValueId value : file_.saved) saved_bytes += bytes_of(graph_[value].geometry);
    for (const ConstantTensor& constant : graph_.constants)
      constant_bytes += bytes_of(graph_[constant.value].geometry);
    print("{} nodes ({} forward, {} backward), {} write memory, {} draw random numbers\n",
          graph_.nodes.size(), graph_.nodes.size() - backward, backward, count_writes(graph_), random);
    print("{} inputs, {} tangents, {} results, {} constants ({})\n", file_.joint.primals,
          file_.joint.tangents.size(), file_.meta.outputs.size(), graph_.constants.size(),
          in_units(constant_bytes));
    const auto [own, of_inputs] = saved_memory();
    print(
        "saved for backward: {} tensors, {} ({} bytes); counting shared memory once {}, plus {} of inputs\n",
        file_.saved.size(), in_units(saved_bytes), saved_bytes, in_units(own), in_units(of_inputs));
  }

  // Bytes of saved tensors, the largest per storage: in their own memory, and in the memory of inputs, which
  // is alive anyway.
  std::pair<std::size_t, std::size_t> saved_memory() const {
    std::map<StorageId, std::size_t> largest;
    for (const ValueId value : file_.saved) {
      std::size_t& bytes = largest[graph_[value].storage];
      bytes = std::max(bytes, bytes_of(graph_[value].geometry));
    }
    std::pair<std::size_t, std::size_t> sums{0, 0};
    std::set<StorageId> inputs;
    for (const Placeholder& input : graph_.inputs) inputs.insert(graph_[input.value].storage);
    for (const auto& [storage, bytes] : largest)
      (inputs.contains(storage) ? sums.second : sums.first) += bytes;
    return sums;
  }

  void operators() {
    std::map<std::string, std::pair<std::size_t, std::size_t>> counts;
    for (const Node& node : graph_.nodes) {
      auto& [forward, backward] = counts[c10::toString(node.op.operator_name())];
      ++(node.phase == Phase::Forward ? forward : backward);
    }
    std::vector<std::pair<std::string, std::pair<std::size_t, std::size_t>>> sorted(counts.begin(),
                                                                                    counts.end());
    std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
      return a.second.first + a.second.second > b.second.first + b.second.second;
    });
    TextTable table({"operator", "forward", "backward"});
    for (const auto& [name, count] : sorted)
      table.add({name, std::to_string(count.first), std::to_string(count.second)});
    print("\noperators\n{}", table.write());
  }

  static std::string written(const InputInfo& info) {
    if (!info.mutates_data && !info.mutates_metadata) return info.is_touched ? "written, unchanged" : "read";
    std::string text = info.mutates_data ? "data" : "";
    if (info.mutates_metadata) text += text.empty() ? "shape" : " and shape";
    text += info.mutation_type() == MutationType::MutatedInGraph ? ", in the graph" : ", after the graph";
    if (info.mutations_under_no_grad) text += ", hidden from autograd";
    return text;
  }

  void inputs() {
    TextTable table({"input", "type", "gradient", "written"});
    std::size_t primal = 0, tensor = 0;
    for (const InputInfo& info : file_.meta.inputs) {
      if (!info.is_tensor || primal >= file_.joint.primals) continue;
      // A subclass corresponds to several graph inputs.
      const std::size_t end =
          primal + (file_.joint.subclasses ? file_.joint.subclasses->inputs.at(tensor++).count() : 1);
      for (; primal < end; ++primal) {
        const Placeholder& input = graph_.inputs[primal];
        table.add({input.name, to_text(graph_[input.value].geometry, graph_.table.get()),
                   info.requires_grad ? "yes" : "no", written(info)});
      }
    }
    for (; primal < graph_.inputs.size(); ++primal)
      table.add({graph_.inputs[primal].name,
                 to_text(graph_[graph_.inputs[primal].value].geometry, graph_.table.get()), "", "read"});
    print("\ninputs\n{}", table.write());
  }

  void results() {
    TextTable table({"result", "type", "gradient", "memory"});
    for (std::size_t i = 0; i < file_.meta.outputs.size(); ++i) {
      const OutputInfo& info = file_.meta.outputs[i];
      std::string memory(info.type == OutputType::Tensor ? to_text(info.kind) : "");
      if (info.base_index) memory += fmt::format(" {}", *info.base_index);
      if (info.same_as) memory += fmt::format(", the same as result {}", *info.same_as);
      std::string type = info.type == OutputType::Tensor ? to_text(info.geometry, graph_.table.get())
                                                         : std::string(to_text(info.type));
      if (file_.joint.subclasses)
        if (const FlattenRecord& record =
                file_.joint.subclasses->forward_outputs.at(file_.meta.mutated_at_run_time().size() + i);
            record.is_subclass())
          type += ", " + record.subclass().to_text();
      table.add({std::to_string(i), std::move(type), info.requires_grad ? "yes" : "no", memory});
    }
    print("\nresults\n{}", table.write());
  }

  void saved() {
    if (file_.saved.empty()) return;
    std::vector<ValueId> sorted = file_.saved;
    std::stable_sort(sorted.begin(), sorted.end(), [&](ValueId a, ValueId b) {
      return bytes_of(graph_[a].geometry) > bytes_of(graph_[b].geometry);
    });
    const std::size_t rows = options_.saved == 0 ? sorted.size() : std::min(options_.saved, sorted.size());
    std::map<ValueId, std::string> made_by;
    for (const Placeholder& input : graph_.inputs) made_by[input.value] = "input " + input.name;
    for (const Node& node : graph_.nodes)
      for_each_value(node.results,
                     [&](ValueId value) { made_by[value] = c10::toString(node.op.operator_name()); });
    TextTable table({"saved", "type", "bytes", "made by"});
    for (std::size_t i = 0; i < rows; ++i)
      table.add({fmt::format("%{}", index_of(sorted[i])),
                 to_text(graph_[sorted[i]].geometry, graph_.table.get()),
                 std::to_string(bytes_of(graph_[sorted[i]].geometry)), made_by[sorted[i]]});
    print("\nsaved for backward, largest first\n{}", table.write());
    if (rows < sorted.size()) print("  ... {} more\n", sorted.size() - rows);
  }

  void nodes() {
    const std::size_t rows =
        options_.nodes == 0 ? graph_.nodes.size() : std::min(options_.nodes, graph_.nodes.size());
    print("\nnodes\n");
    for (std::size_t i = 0; i < rows; ++i)
      print("  {:<5} {} {}\n", i, graph_.nodes[i].phase == Phase::Forward ? "F" : "B",
            to_text(graph_, graph_.nodes[i]));
    if (rows < graph_.nodes.size()) print("  ... {} more\n", graph_.nodes.size() - rows);
  }

  const GraphFile& file_;
  const Graph& graph_;
  const ReportOptions& options_;
  std::string text_;
};

}  // namespace

std::string report_text(const GraphFile& file, const ReportOptions& options) {
  return GraphReport(file, options).write();
}

}  // namespace penstock::graph
