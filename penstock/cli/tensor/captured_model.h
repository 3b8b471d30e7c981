// The trainer's model as a graph, for commands that show it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "penstock/graph/partition/partition.h"
#include "penstock/graph/tools/graph_file.h"
#include "penstock/train_config.h"

namespace penstock::cli {

struct CapturedModel {
  graph::GraphFile file;
  std::string passes;  // what they did, if they ran
  // For running it: forward and backward, and an input for each one of forward.
  graph::Partition halves;
  std::vector<at::Tensor> inputs;
};

// Running: with the passes, and with what a run needs.
enum class CaptureFor { Reading, WithPasses, Running };

// Captures forward and backward of one microbatch of the whole model, shapes only. `saved` of the file is
// that of the activation budget of the configuration (activations_of_whole_model) or, without one, of the
// partition: with `min_cut` the one that recomputes cheap values. Allocates the parameters; throws
// ConfigError if the machine has not enough memory.
CapturedModel capture_model(const train::TrainConfig& config, bool min_cut, CaptureFor purpose);

// "model tiny, one microbatch of 2 x 64 tokens"
std::string title_of(const train::TrainConfig& config);

// Throw ConfigError for a file that cannot be written. write_shown() says that it was written.
void write_output(const std::string& path, const std::string& text);
void write_shown(const std::string& path, const std::string& text);

}  // namespace penstock::cli
