// penstock inspect costs: measures the parts of a model on this machine, for penstock partition.
#include <fmt/format.h>

#include <memory>
#include <string>

#include "penstock/cli/common/commands.h"
#include "penstock/cli/plain/cost_file.h"
#include "penstock/cli/plain/schedule_flags.h"
#include "penstock/train/job/configured_model.h"
#include "penstock/train/job/host_check.h"
#include "penstock/train/job/job.h"
#include "penstock/train/job/process_memory.h"
#include "penstock/train/plan/part_costs.h"
#include "penstock/world.h"

namespace penstock::cli {
namespace {

PartCost part_cost(const train::PartMeasurement& measured) {
  return {
      .forward = measured.forward, .backward = measured.backward, .kept = static_cast<double>(measured.kept)};
}

void run_inspect_costs(const CLI::App& command, const std::string& output) {
  const train::ResolvedConfig resolved = train::load_config(config_sources(command));
  refuse_keys(resolved, "inspect costs", has_effect_without_run);
  const train::TrainConfig& config = resolved.config;
  const at::Device device =
      train::configured_device(config.layout, comm::World::fake(0, static_cast<int>(config.layout.ranks)));
  train::require_precision(config, device);
  if (device.is_cpu())
    train::require_memory(train::minimum_memory_of_parts(config), train::machine_memory_bytes());
  const train::PartMeasurements measured =
      train::measure_parts(config, *train::configured_model(config), device, {}, /*splits=*/false);
  const auto border = static_cast<double>(measured.border);
  CostFile costs{
      .embed = part_cost(measured.embed), .blocks = {}, .head = part_cost(measured.head), .border = border};
  costs.head.kept += border;  // its input
  for (const auto& [kind, block] : measured.blocks) {
    PartCost& cost = costs.blocks[kind] = part_cost(block);
    cost.kept += border;
    const auto shared = measured.shared.find(kind);
    if (shared == measured.shared.end()) continue;
    // What the blocks of a kind share is kept once by a stage.
    cost.kept -= static_cast<double>(shared->second);
    costs.kept_by_stage += static_cast<double>(shared->second);
  }
  write_text(output, to_json(costs));
}

}  // namespace

void add_inspect_costs_command(CLI::App& inspect, CommandOutcome&) {
  CLI::App* command = inspect.add_subcommand(
      "costs", "Measured time and memory of an embedding, a block of each kind and a head, as JSON");
  const auto output = std::make_shared<std::string>();
  command->add_option("-o,--output", *output, "File to write (default: standard output)")->type_name("F");
  command->footer(
      "Usage: penstock inspect costs [CONFIG.toml] [--section.key value ...]\n\n"
      "Example:\n"
      "  penstock inspect costs my.toml -o costs.json\n"
      "  penstock partition my.toml --costs costs.json\n\n"
      "Runs forward and backward of single parts, for one microbatch, with the threads of a rank. Takes some "
      "seconds.\n"
      "Exit codes: 0 ok, 2 usage or parse error.");
  command->allow_extras();
  command->callback([command, output] { run_inspect_costs(*command, *output); });
}

}  // namespace penstock::cli
