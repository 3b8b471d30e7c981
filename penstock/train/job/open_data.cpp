// The data of a run: opened, and made first where there are none.
#include <fmt/format.h>

#include <atomic>
#include <chrono>

#include "penstock/errors.h"
#include "penstock/base/files.h"
#include "penstock/base/log.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/train/job/configured_data.h"
#include "penstock/train/data/make_shards.h"
#include "penstock/trainer.h"

namespace penstock::train {

namespace {

namespace fs = std::filesystem;

void make_data(const DataConfig& config, const fs::path& folder, const std::atomic<bool>& stop) {
  if (file_exists(folder)) return;  // of a run that is resumed: shards appear as a whole
  using Clock = std::chrono::steady_clock;
  MakeShardsOptions options;
  options.sources = source_options(config);
  options.progress = [&stop, next = Clock::now() + std::chrono::seconds(1)](const MakeShardsProgress& progress) mutable {
    if (stop) throw StateError("data: given up, because a rank that waited for them is gone");
    if (Clock::now() < next) return;
    next = Clock::now() + std::chrono::seconds(5);
    log().info("data: making tokens of {} of {}, {} of {} files", format_bytes(progress.bytes), format_bytes(progress.of_bytes), progress.files, progress.of_files);
  };
  const MadeShards made = make_shards(folder, options);
  // Of the system's own headers some are always empty, and nobody can mend them.
  const auto level = config.sources.empty() ? spdlog::level::debug : spdlog::level::warn;
  for (const BadFile& file : made.bad) log().log(level, "data: skipped {}: {}", file.path.string(), file.why);
  if (made.too_large > 0) log().info("data: left out {} larger than {}", count_of(made.too_large, "file"), format_bytes(made.max_file_bytes));
  if (made.beyond_cap > 0) log().info("data: left out {} beyond data.cap_bytes = {}", count_of(made.beyond_cap, "file"), config.cap_bytes);
  for (const fs::path& file : made.cut) log().warn("data: took only the first {} of {}, because of data.cap_bytes", format_bytes(static_cast<std::uint64_t>(config.cap_bytes)), file.string());
  log().info("data: {} of {}", count_of(made.tokens, "token"), count_of(made.documents, "file"));
}

}  // namespace

TrainingData open_data(const comm::World& world, const TrainConfig& config, const fs::path& folder) {
  const fs::path made = folder / "data";
  std::optional<TokenSources> sources;
  checkpoint::WorldMeeting meeting(world);
  meeting.agree("looking at the data", [&] { sources = open_configured_tokens(config); });
  if (!sources) run_on_first_rank(world, "making the training data", std::chrono::seconds(5), [&](const std::atomic<bool>& stop) { make_data(config.data, made, stop); });
  TrainingData data;
  meeting.agree("opening the training data", [&] { data = make_samplers(config, sources ? *sources : open_shards(made)); });
  return data;
}

}  // namespace penstock::train
