#include "penstock/train/job/configured_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/files.h"
#include "penstock/base/text.h"
#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/errors.h"
#include "penstock/train/data/byte_tokenizer.h"
#include "penstock/train/data/make_shards.h"
#include "penstock/train/data/sampler.h"
#include "penstock/train/job/structure_metadata.h"

namespace penstock::train {

namespace {

namespace fs = std::filesystem;

bool validates(const TrainConfig& config) { return config.data.validation_fraction > 0; }

void check_vocabulary(const TrainConfig& config, std::uint64_t of_data) {
  if (static_cast<std::int64_t>(of_data) > config.model.vocabulary)
    throw ConfigError(describe("model.vocabulary", std::to_string(config.model.vocabulary),
                               fmt::format("at least the {} of the data", of_data),
                               "raise it, or use other data"));
}

// Reads like a run: the first samples of the training data, or all of them if the run repeats the data.
void read_samples(const Sampler& sampler, std::int64_t rounds, std::int64_t round,
                  const DataCheckProgress& progress) {
  constexpr std::uint64_t kAtOnce = std::uint64_t{1} << 20;
  const std::string what = fmt::format("reading the {}", sampler.dataset().name());
  const auto tell = [&](std::uint64_t done, std::uint64_t all) {
    if (progress) progress(what, static_cast<double>(done) / static_cast<double>(all));
  };
  const std::uint64_t epoch = sampler.samples_per_epoch();
  const auto each = static_cast<std::uint64_t>(round);
  if (static_cast<std::uint64_t>(rounds) >= epoch / each) {
    const std::uint64_t all = sampler.dataset().tokens();
    std::vector<std::int64_t> tokens(std::min(all, kAtOnce)), documents(tokens.size());
    for (std::uint64_t begin = 0; begin < all; begin += tokens.size()) {
      tell(begin, all);
      const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(tokens.size(), all - begin));
      sampler.dataset().read(begin, std::span(tokens).first(count), std::span(documents).first(count));
    }
    return;
  }
  Batch batch;
  const std::uint64_t all = static_cast<std::uint64_t>(rounds) * each;
  const std::uint64_t at_once =
      std::max<std::uint64_t>(1, kAtOnce / static_cast<std::uint64_t>(sampler.options().context));
  for (std::uint64_t position = 0; position < all; position += at_once) {
    tell(position, all);
    sampler.fill(position, static_cast<std::int64_t>(std::min(at_once, all - position)), batch);
  }
}

std::string check_tokens(const TrainConfig& config, const TokenSources& sources, const std::string& where,
                         DataCheck check, const DataCheckProgress& progress) {
  const TrainingData data = make_samplers(config, sources);
  check_vocabulary(config, data.training->dataset().vocabulary());
  const bool reads = check == DataCheck::Reading,
             validation_is_read = reads && data.validation && config.training.validate_every > 0;
  if (reads) read_samples(*data.training, config.training.steps, config.training.global_batch, progress);
  if (validation_is_read)
    read_samples(*data.validation, config.training.validate_batches,
                 config.training.global_batch / std::max<std::int64_t>(1, config.training.accumulation),
                 progress);
  return fmt::format(
      "{} tokens for training{} in {}, {} samples per epoch", data.training->dataset().tokens(),
      data.validation ? fmt::format(" and {} for validation", data.validation->dataset().tokens())
                      : std::string(),
      where, data.training->samples_per_epoch());
}

// Returns the files that are text. Some turn out not to be text only when they are read.
std::vector<SourceFile> text_files(const SourceList& found, bool skip, const DataCheckProgress& progress) {
  std::vector<SourceFile> good;
  std::uint64_t seen = 0;
  for (SourceFile file : found.files) {
    std::uint64_t read = 0;
    try {
      read_source(file, [&](std::string_view text) {
        read += text.size();
        seen += text.size();
        if (progress)
          progress("reading the source files",
                   std::min(1.0, static_cast<double>(seen) / static_cast<double>(found.bytes)));
      });
    } catch (const ConfigError&) {
      if (!skip) throw;
      continue;
    }
    file.bytes = read;
    good.push_back(std::move(file));
  }
  return good;
}

std::string check_text(const TrainConfig& config, DataCheck check, const DataCheckProgress& progress) {
  check_vocabulary(config, byte_tokenizer::kVocabulary);
  const SourceOptions options = source_options(config.data);
  if (progress) progress("searching for source files", -1);
  const SourceList found = find_sources(options);
  const std::vector<SourceFile> good =
      check == DataCheck::Reading
          ? text_files(found, options.skip_bad_files || options.paths.empty(), progress)
          : found.files;
  if (good.empty())
    throw ConfigError(describe("source files", fmt::format("{}, all of them unusable", found.files.size()),
                               "at least one text file", "give other paths"));
  DocumentSplit split(config.data.validation_fraction);
  std::uint64_t bytes = 0;
  for (const SourceFile& file : good) {
    split.count(file.bytes + 1, file.key);
    bytes += file.bytes;
  }
  split.decide();
  std::uint64_t validation = 0;
  for (const SourceFile& file : good) validation += split.validation_tokens(file.bytes + 1, file.key);
  check_space_for_shards(
      (config.output.run_folder.empty() ? fs::path("runs/new") : fs::path(config.output.run_folder)) / "data",
      bytes, good.size());
  const std::string of = good.size() == 1 ? good.front().path.string() : fmt::format("{} files", good.size());
  const auto check_side = [&](DataSplit side, std::uint64_t tokens) {
    check_enough_tokens({.name = fmt::format("{} tokens of {}", to_text(side), of),
                         .split = side,
                         .tokens = tokens,
                         .of_tokens = split.tokens()},
                        config.model.context);
  };
  check_side(validates(config) ? DataSplit::Training : DataSplit::All, split.tokens() - validation);
  if (validates(config)) check_side(DataSplit::Validation, validation);
  std::string text = fmt::format("{}, {}, to be converted to byte tokens: {} for training", of,
                                 format_bytes(bytes), split.tokens() - validation);
  if (validates(config))
    text += fmt::format(" and {} for validation{}", validation, split.cuts() ? ", cut inside documents" : "");
  return text + fmt::format(", {} samples per epoch",
                            (split.tokens() - validation) / static_cast<std::uint64_t>(config.model.context));
}

}  // namespace

SourceOptions source_options(const DataConfig& config) {
  SourceOptions options;
  options.paths.assign(config.sources.begin(), config.sources.end());
  options.extensions = config.extensions;
  options.cap_bytes = static_cast<std::uint64_t>(config.cap_bytes);
  options.skip_bad_files = config.skip_bad_files;
  return options;
}

DataFiles configured_files(const DataConfig& config) {
  DataFilesOptions options;
  options.paths.assign(config.sources.begin(), config.sources.end());
  options.format = config.format;
  options.extensions = config.extensions;
  DataFiles found = find_data_files(options);
  if (found.kind == DataKind::Text && config.end_of_document >= 0)
    throw ConfigError(describe("data.end_of_document", std::to_string(config.end_of_document), "token files",
                               "leave it out: each text file is one document"));
  if (found.kind != DataKind::Text && config.cap_bytes > 0)
    throw ConfigError(describe("data.cap_bytes", std::to_string(config.cap_bytes),
                               "0 for token files, which are used completely",
                               "leave it out, or give fewer files"));
  return found;
}

bool tokenizer_is_unknown(const DataConfig& config) {
  if (config.format == "uint16") return true;
  if (config.format == "text") return false;
  const auto is_bin = [](const std::string& source) {
    return to_lower(fs::path(source).extension().string()) == ".bin";
  };
  if (std::any_of(config.sources.begin(), config.sources.end(), is_bin))
    return true;  // any other .bin file would have been refused
  try {
    return configured_files(config).kind != DataKind::Text;
  } catch (const ConfigError&) {
    return false;  // removed or changed since then
  }
}

std::optional<TokenSources> open_configured_tokens(const TrainConfig& config) {
  if (!config.data.shards.empty()) return open_shards(config.data.shards);
  const DataFiles files = configured_files(config.data);
  if (files.kind == DataKind::Text) return std::nullopt;
  std::optional<std::uint32_t> end;
  if (config.data.end_of_document >= 0) end = static_cast<std::uint32_t>(config.data.end_of_document);
  return open_token_files(files, static_cast<std::uint64_t>(config.model.vocabulary), end);
}

TrainingData make_samplers(const TrainConfig& config, const TokenSources& sources) {
  const auto sampler = [&](DataSplit split) {
    return std::make_shared<const Sampler>(
        std::make_shared<const TokenDataset>(sources, split, config.data.validation_fraction),
        SamplerOptions{.context = config.model.context,
                       .seed = static_cast<std::uint64_t>(config.training.seed),
                       .shuffle = split != DataSplit::Validation,
                       .cpp_structure = trains_on_structure(config)});
  };
  TrainingData data;
  data.training = sampler(validates(config) ? DataSplit::Training : DataSplit::All);
  if (validates(config)) data.validation = sampler(DataSplit::Validation);
  return data;
}

std::string check_data(const TrainConfig& config, DataCheck check, const DataCheckProgress& progress) {
  if (progress) progress("opening the data", -1);
  if (const auto sources = open_configured_tokens(config)) {
    const std::string where = config.data.shards.empty()
                                  ? (sources->size() == 1 ? sources->front()->name()
                                                          : fmt::format("{} token files", sources->size()))
                                  : config.data.shards;
    return check_tokens(config, *sources, where, check, progress);
  }
  // A continued run has already made its data.
  const fs::path made = fs::path(config.output.run_folder) / "data";
  if (!config.output.run_folder.empty() && file_exists(made))
    return check_tokens(config, open_shards(made), made.string(), check, progress);
  return check_text(config, check, progress);
}

void run_on_first_rank(const comm::World& world, const std::string& topic, std::chrono::milliseconds between,
                       const LongWork& work) {
  // Stops and waits for the work when the ranks fail to communicate.
  struct Running {
    ~Running() { stop = true; }
    std::atomic<bool> stop{false};
    std::future<void> done;  // its destructor waits; destroyed after ~Running's body
  } running;
  if (world.rank() == 0) running.done = std::async(std::launch::async, [&] { work(running.stop); });
  checkpoint::WorldAgreement agreement(world);
  const std::chrono::milliseconds turn = std::min(between, world.group().timeout() / 4);
  for (bool done = false; !done;) {
    const checkpoint::Bytes verdict = agreement.agree(
        topic,
        [&] {
          const bool ready = world.rank() == 0 && running.done.wait_for(turn) == std::future_status::ready;
          if (ready) running.done.get();
          return checkpoint::Bytes{static_cast<std::uint8_t>(ready)};
        },
        [](const std::vector<checkpoint::Bytes>& answers) { return answers.at(0); });
    done = verdict.at(0) != 0;
  }
}

}  // namespace penstock::train
