// The data that a configuration names: what kind they are, the samplers over them, and whether a run can be trained on them.
//
//   data.shards     a folder of token shards
//   data.sources    text, which is made into token shards in the run folder, or token files of other programs (data_files.h), which are read
//                   where they are
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "penstock/world.h"
#include "penstock/train_config.h"
#include "penstock/train/data/data_files.h"
#include "penstock/train/job/job.h"
#include "penstock/train/data/source_files.h"

namespace penstock::train {

// What data.sources are. Throws ConfigError as find_data_files does, and for keys that have no meaning for what was found.
DataFiles configured_files(const DataConfig& config);
SourceOptions source_options(const DataConfig& config);

// Whether the tokens are those of a tokenizer that is not known here, so that no text can be made of them.
bool tokens_have_no_text(const DataConfig& config);

// Those that need not be made: shards, or token files. nullopt: text.
std::optional<TokenSources> open_configured_tokens(const TrainConfig& config);
// Throws ConfigError for too little data.
TrainingData make_samplers(const TrainConfig& config, const TokenSources& sources);

// Told now and then what is being done; the share of it that is done is from 0 to 1, or negative where it is not known.
using LookProgress = std::function<void(const std::string& what, double share)>;

// How far check_data looks.
enum class DataCheck {
  Opening,  // headers, sizes and amounts: what a start can wait for
  Reading,  // also everything that the run would read, for its checksums and for bytes that are no text
};
// Finds and checks the data, but makes nothing: what a run would refuse is refused. Returns one line for people.
std::string check_data(const TrainConfig& config, DataCheck check, const LookProgress& progress = {});

// [collective] Runs `work` on rank 0 while the others wait, however long it takes: no timeout of the world is for the data of others. `stop` becomes true
// when the ranks cannot wait any longer (one of them is gone): the work should then throw. An error of the work is thrown on every rank.
using LongWork = std::function<void(const std::atomic<bool>& stop)>;
void run_on_first_rank(const comm::World& world, const std::string& topic, std::chrono::milliseconds between, const LongWork& work);

}  // namespace penstock::train
