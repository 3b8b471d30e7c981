// The report of one run, or of several beside each other: one HTML page without references to anything outside.
//
//   write(report_page({load_run("runs/first")}));
//   write(report_page({load_run("runs/first"), load_run("runs/second")}));
//
// Shown are: the numbers that matter, curves of loss, learning rate, gradient norm, speed and memory with values under the pointer, where
// the time of a step went (as the trainer measured it, and per rank from the traced steps, beside the simulation of the schedule), the
// timeline of a step over the ranks, the partition, checkpoints, the configuration; for several runs the curves in one picture and tables
// of what differs. What is missing is said on the page. All texts of the run are escaped. Knows nothing of Torch.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "penstock/train/report/run_report.h"

namespace penstock::train {

// Throws ValueError when there is no run.
std::string report_page(const std::vector<RunReport>& runs);

// Whole or not at all: to a file beside it first. Throws ConfigError where it cannot be written.
void write_page(const std::filesystem::path& path, const std::string& page);

// Reads the folder and writes report.html into it; gives the path of the page.
std::filesystem::path write_report(const std::filesystem::path& folder);

}  // namespace penstock::train
