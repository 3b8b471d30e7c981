// Finds the data that a configuration names: their kind, the samplers over them, and whether a run can train
// on them.
//
//   data.shards     a folder of token shards
//   data.sources    text, which is converted to token shards in the run folder, or token files of other
//                   programs (data_files.h), which are read in place
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "penstock/train/data/data_files.h"
#include "penstock/train/data/source_files.h"
#include "penstock/train/job/job.h"
#include "penstock/train_config.h"
#include "penstock/world.h"

namespace penstock::train {

// Returns what data.sources are. Throws ConfigError like find_data_files, and for keys that do not apply to
// what was found.
DataFiles configured_files(const DataConfig& config);
SourceOptions source_options(const DataConfig& config);

// Returns whether the tokens were made by an unknown tokenizer, so that they cannot be converted to text.
bool tokenizer_is_unknown(const DataConfig& config);

// Opens data that need no conversion: shards or token files. Returns std::nullopt for text.
std::optional<TokenSources> open_configured_tokens(const TrainConfig& config);
// Throws ConfigError if there is too little data.
TrainingData make_samplers(const TrainConfig& config, const TokenSources& sources);

// Called now and then with the current activity and its completed share from 0 to 1, negative if unknown.
using DataCheckProgress = std::function<void(const std::string& what, double share)>;

// How thoroughly check_data checks.
enum class DataCheck {
  Opening,  // headers, sizes and amounts: fast enough for every start
  Reading,  // also reads all data of the run, to verify checksums and to find bytes that are not text
};
// Finds and checks the data without converting them. Throws for everything that a run would refuse. Returns
// one line for the user.
std::string check_data(const TrainConfig& config, DataCheck check, const DataCheckProgress& progress = {});

// [collective] Runs `work` on rank 0 while the other ranks wait, however long it takes: the world's timeouts
// do not apply. `stop` becomes true when the ranks cannot wait any longer because one of them is gone: the
// work should then throw. An error of the work is thrown on every rank.
using LongWork = std::function<void(const std::atomic<bool>& stop)>;
void run_on_first_rank(const comm::World& world, const std::string& topic, std::chrono::milliseconds between,
                       const LongWork& work);

}  // namespace penstock::train
