// The report of one run, or a comparison of several, as one HTML page without external references.
//
//   write(report_page({load_run("runs/first")}));
//   write(report_page({load_run("runs/first"), load_run("runs/second")}));
//
// The page shows key figures, curves of loss, learning rate, gradient norm, speed and memory with values
// under the pointer, the time breakdown of a step (as measured by the trainer, and per rank from the traced
// steps, next to the simulated schedule), the timeline of a step over the ranks, the partition, checkpoints
// and the configuration. For several runs it shows the curves in one chart and tables of the differences.
// Missing information is listed on the page. All text from the run is escaped. Independent of Torch.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "penstock/train/report/run_report.h"

namespace penstock::train {

// Throws ValueError if there is no run.
std::string report_page(const std::vector<RunReport>& runs);

// Writes a temporary file next to `path` and renames it. Throws ConfigError if that fails.
void write_page(const std::filesystem::path& path, const std::string& page);

// Reads the run folder and writes report.html into it. Returns the path of the page.
std::filesystem::path write_report(const std::filesystem::path& folder);

}  // namespace penstock::train
