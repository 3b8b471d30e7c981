#include "penstock/train/job/open_data.h"

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <optional>

#include "penstock/base/files.h"
#include "penstock/base/log.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/errors.h"
#include "penstock/train/data/make_shards.h"
#include "penstock/train/job/configured_data.h"

namespace penstock::train {

namespace {

namespace fs = std::filesystem;

void make_data(const DataConfig& config, const fs::path& folder, const std::atomic<bool>& stop) {
  if (file_exists(folder)) return;  // resumed run: the folder is only created with complete shards
  using Clock = std::chrono::steady_clock;
  MakeShardsOptions options;
  options.sources = source_options(config);
  options.progress = [&stop, next = Clock::now() +
                                    std::chrono::seconds(1)](const MakeShardsProgress& progress) mutable {
    if (stop) throw StateError("data: stopped making shards, because a waiting rank is gone");
    if (Clock::now() < next) return;
    next = Clock::now() + std::chrono::seconds(5);
    log().info("data: tokenized {} of {}, {} of {} files", format_bytes(progress.bytes),
               format_bytes(progress.of_bytes), progress.files, progress.of_files);
  };
  const MakeShardsResult made = make_shards(folder, options);
  // Some system headers are always empty, and the user cannot fix them.
  const auto level = config.sources.empty() ? spdlog::level::debug : spdlog::level::warn;
  for (const BadFile& file : made.bad) log().log(level, "data: skipped {}: {}", file.path.string(), file.why);
  if (made.too_large > 0)
    log().info("data: skipped {} larger than {}", count_of(made.too_large, "file"),
               format_bytes(made.max_file_bytes));
  if (made.beyond_cap > 0)
    log().info("data: skipped {} beyond data.cap_bytes = {}", count_of(made.beyond_cap, "file"),
               config.cap_bytes);
  for (const fs::path& file : made.cut)
    log().warn("data: used only the first {} of {}, because of data.cap_bytes",
               format_bytes(static_cast<std::uint64_t>(config.cap_bytes)), file.string());
  log().info("data: {} from {}", count_of(made.tokens, "token"), count_of(made.documents, "file"));
}

}  // namespace

TrainingData open_data(const comm::World& world, const TrainConfig& config, const fs::path& folder) {
  const fs::path made = folder / "data";
  std::optional<TokenSources> sources;
  checkpoint::WorldAgreement agreement(world);
  agreement.agree("looking at the data", [&] { sources = open_configured_tokens(config); });
  if (!sources)
    run_on_first_rank(world, "making the training data", std::chrono::seconds(5),
                      [&](const std::atomic<bool>& stop) { make_data(config.data, made, stop); });
  TrainingData data;
  agreement.agree("opening the training data",
                  [&] { data = make_samplers(config, sources ? *sources : open_shards(made)); });
  return data;
}

}  // namespace penstock::train
