#include "penstock/graph/tools/kernel_report.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/cuda.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/graph/fused/fused_graph.h"
#include "penstock/graph_compiler.h"

namespace penstock::graph {
namespace {

using KernelClock = std::chrono::steady_clock;

void wait_for(c10::Device device) {
  if (device.is_cuda()) torch::cuda::synchronize(device.index());
}

double seconds_from(KernelClock::time_point begin) {
  return std::chrono::duration<double>(KernelClock::now() - begin).count();
}

// Both halves, compiled.
struct CompiledStep {
  CompiledStep(const Partition& halves, const CompileRequest& request, std::string_view compiler)
      : forward(graph_compiler(compiler)->compile(halves.forward, request)),
        backward(halves.backward.outputs.empty()
                     ? nullptr
                     : graph_compiler(compiler)->compile(halves.backward, request)) {}

  // One forward and one backward.
  double run(const Partition& halves, const std::vector<at::Tensor>& inputs) const {
    const at::NoGradGuard no_gradients;
    const at::Device device = halves.forward[halves.forward.inputs.front().value].geometry.device;
    wait_for(device);
    const auto begin = KernelClock::now();
    const std::vector<c10::IValue> results = forward->run(inputs, nullptr);
    if (backward) {
      std::vector<at::Tensor> given;
      for (std::size_t i = halves.first_saved_output(); i < results.size(); ++i)
        given.push_back(results[i].toTensor());
      for (std::size_t i = given.size(); i < halves.backward.inputs.size(); ++i) {
        const Geometry& geometry = halves.backward[halves.backward.inputs[i].value].geometry;
        given.push_back(at::empty_strided(geometry.sizes, geometry.strides,
                                          at::dtype(geometry.dtype).device(geometry.device))
                            .fill_(1));
      }
      static_cast<void>(backward->run(std::move(given), nullptr));
    }
    wait_for(device);
    return seconds_from(begin);
  }

  std::shared_ptr<const CompiledGraph> forward, backward;
};

struct KernelRow {
  FusedKernelReport kernel;
  std::string half;
  std::size_t places = 0;  // in the graph; the times are added up
};

double least_of(const std::vector<double>& values) { return *std::min_element(values.begin(), values.end()); }

}  // namespace

double copy_bandwidth(c10::Device device) {
  const at::Tensor from = at::ones({std::int64_t{device.is_cuda() ? 256 : 16} << 20}, device),
                   to = at::empty_like(from);
  double best = 0;
  for (int i = 0; i < 6; ++i) {
    wait_for(device);
    const auto begin = KernelClock::now();
    to.copy_(from);
    wait_for(device);
    best = std::max(best, 2 * static_cast<double>(from.nbytes()) / seconds_from(begin));
  }
  return best;
}

std::string kernel_report(const Partition& halves, const std::vector<at::Tensor>& inputs,
                          const KernelReportOptions& options) {
  CompileRequest request;
  request.exact = options.exact;
  const CompiledStep fused(halves, request, kFusedCompiler), plain(halves, request, kExecutorCompiler);
  std::vector<std::pair<std::string, const FusedGraph*>> graphs;
  for (const auto& [half, compiled] :
       {std::pair<std::string, const CompiledGraph*>("forward", fused.forward.get()),
        std::pair<std::string, const CompiledGraph*>("backward", fused.backward.get())})
    if (const FusedGraph* graph = compiled ? fused_graph(*compiled) : nullptr)
      graphs.emplace_back(half, graph);
  if (graphs.empty())
    return "no kernels: there is nothing to fuse, or no compiler for it (see the warning)\n";

  fused.run(halves, inputs);
  plain.run(halves, inputs);
  for (const auto& [half, graph] : graphs) graph->measure(true);
  std::vector<double> with, without;
  for (std::size_t i = 0; i < options.runs; ++i) {
    with.push_back(fused.run(halves, inputs));
    without.push_back(plain.run(halves, inputs));
  }
  const double step = least_of(with), bandwidth = copy_bandwidth(inputs.front().device()),
               runs = static_cast<double>(options.runs);

  std::vector<KernelRow> rows;
  std::map<std::pair<std::string, std::string>, std::size_t> row_of;
  for (const auto& [half, graph] : graphs)
    for (const FusedKernelReport& kernel : graph->kernels()) {
      const auto [row, is_new] = row_of.try_emplace({half, kernel.name}, rows.size());
      if (is_new) {
        rows.push_back({kernel, half, 1});
        continue;
      }
      KernelRow& known = rows[row->second];
      ++known.places;
      known.kernel.calls += kernel.calls;
      known.kernel.seconds += kernel.seconds;
    }
  std::stable_sort(rows.begin(), rows.end(), [](const KernelRow& a, const KernelRow& b) {
    return a.kernel.seconds > b.kernel.seconds;
  });

  double in_kernels = 0;
  std::string text =
      fmt::format("{:<10} {:<9} {:<9} {:>5} {:>10} {:>9} {:>6} {:>8} {:>8}  {}\n", "kernel", "half", "form",
                  "calls", "bytes", "us", "share", "GB/s", "of copy", "operators");
  for (const KernelRow& row : rows) {
    const double seconds = row.kernel.seconds;  // of all its calls in a step
    const double calls = static_cast<double>(row.kernel.calls) / runs;
    const double rate = seconds > 0 ? static_cast<double>(row.kernel.bytes) * calls / seconds : 0;
    in_kernels += seconds;
    text += fmt::format("{:<10} {:<9} {:<9} {:>5.0f} {:>10} {:>9.1f} {:>5.1f}% {:>8.2f} {:>7.0f}%  {}\n",
                        row.kernel.name, row.half, row.kernel.form, calls,
                        format_bytes(static_cast<std::uint64_t>(row.kernel.bytes)), 1e6 * seconds,
                        100 * seconds / step, 1e-9 * rate, 100 * rate / bandwidth, row.kernel.operators);
  }
  text += fmt::format(
      "step: {:.3f} ms, of which kernels {:.1f}%; by the operators alone {:.3f} ms (fused/operators {:.2f}); "
      "a copy moves "
      "{:.2f} GB/s\n",
      1e3 * step, 100 * in_kernels / step, 1e3 * least_of(without), step / least_of(without),
      1e-9 * bandwidth);
  if (options.sources)
    for (const KernelRow& row : rows)
      text += fmt::format("\n// {}, {}\n{}", row.kernel.name, row.half, row.kernel.source);
  return text;
}

}  // namespace penstock::graph
