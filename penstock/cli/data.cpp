// penstock data: makes token shards from files, and shows what a folder of them holds.
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/base/errors.h"
#include "penstock/base/printable.h"
#include "penstock/base/text.h"
#include "penstock/cli/commands.h"
#include "penstock/train/make_shards.h"
#include "penstock/train/token_dataset.h"

namespace penstock::cli {

namespace {

struct MakeFlags {
  std::string out;
  std::vector<std::string> sources;
  std::vector<std::string> extensions;
  std::uint64_t cap_bytes = 0;
  std::uint64_t max_file_bytes = std::uint64_t{1} << 20;
  std::uint64_t shard_tokens = std::uint64_t{1} << 26;
  bool skip_bad_files = false;
  bool overwrite = false;
};

// One line that is written over on a terminal, a line now and then elsewhere; nothing for work that is done at once.
class ProgressLine {
 public:
  void show(const train::MakeShardsProgress& progress) {
    const auto now = std::chrono::steady_clock::now();
    if (now < next_) return;
    next_ = now + (terminal_ ? std::chrono::milliseconds(200) : std::chrono::milliseconds(5000));
    const double share = progress.of_bytes == 0 ? 1 : static_cast<double>(progress.bytes) / static_cast<double>(progress.of_bytes);
    fmt::print(stderr, "{}{:3.0f} %  {} of {} files, {} of {}{}", terminal_ ? "\r" : "", 100 * share, progress.files,
               progress.of_files, format_bytes(progress.bytes), format_bytes(progress.of_bytes), terminal_ ? "\x1b[K" : "\n");
    shown_ = true;
    std::fflush(stderr);
  }
  ~ProgressLine() {
    if (shown_ && terminal_) std::fputs("\r\x1b[K", stderr);
  }

 private:
  const bool terminal_ = ::isatty(STDERR_FILENO) == 1;
  bool shown_ = false;
  std::chrono::steady_clock::time_point next_ = std::chrono::steady_clock::now() + std::chrono::seconds(1);
};

void make(const MakeFlags& flags) {
  if (flags.shard_tokens == 0) throw ConfigError(describe("--shard-tokens", "0", "a whole number of at least 1", "leave it out for 2^26"));
  train::MakeShardsOptions options;
  options.sources.paths.assign(flags.sources.begin(), flags.sources.end());
  options.sources.extensions = flags.extensions;
  options.sources.cap_bytes = flags.cap_bytes;
  options.sources.max_file_bytes = flags.max_file_bytes;
  options.sources.skip_bad_files = flags.skip_bad_files;
  options.shard_tokens = flags.shard_tokens;
  options.overwrite = flags.overwrite;
  train::MadeShards made;
  {
    ProgressLine line;
    options.progress = [&](const train::MakeShardsProgress& progress) { line.show(progress); };
    made = train::make_shards(flags.out, options);
  }
  for (const train::BadFile& file : made.bad) fmt::print(stderr, "skipped {}: {}\n", printable(file.path.string()), file.why);
  fmt::print("{}: {} tokens of {} files ({}) in {} shard{}\n", printable(flags.out), made.tokens, made.documents,
             format_bytes(made.bytes), made.shards, made.shards == 1 ? "" : "s");
  if (made.bad.size() + made.too_large + made.beyond_cap > 0)
    fmt::print("left out: {} bad, {} larger than {}, {} beyond the cap\n", made.bad.size(), made.too_large,
               format_bytes(flags.max_file_bytes), made.beyond_cap);
}

struct ShowFlags {
  std::string folder;
  double validation_fraction = 0.05;
};

void show(const ShowFlags& flags, Outcome& outcome) {
  if (!(flags.validation_fraction >= 0 && flags.validation_fraction <= 1))
    throw ConfigError(describe("--validation-fraction", fmt::format("{}", flags.validation_fraction), "a number from 0 to 1"));
  const auto files = train::shard_files(flags.folder);
  fmt::print("{:<28} {:>10} {:>14} {:>6} {:>10}  {}\n", "shard", "documents", "tokens", "bytes", "vocabulary", "checksums");
  std::uint64_t documents = 0;
  std::uint64_t tokens = 0;
  std::uint64_t validation_documents = 0;
  std::uint64_t validation_tokens = 0;
  std::vector<std::string> damage;
  for (const auto& file : files) {
    const std::string name = printable(file.filename().string());
    std::shared_ptr<const train::TokenShard> shard;
    const std::size_t damaged_before = damage.size();
    try {
      shard = train::TokenShard::open(file);
      shard->verify();
    } catch (const ConfigError& error) {
      damage.emplace_back(error.what());
    }
    if (!shard) {
      fmt::print("{:<28} {:>10} {:>14} {:>6} {:>10}  DAMAGED\n", name, "-", "-", "-", "-");
      continue;
    }
    const bool damaged = damage.size() > damaged_before;
    fmt::print("{:<28} {:>10} {:>14} {:>6} {:>10}  {}\n", name, shard->documents(), shard->tokens(),
               shard->header().token_bytes, shard->header().vocabulary, damaged ? "DAMAGED" : "ok");
    documents += shard->documents();
    tokens += shard->tokens();
    for (std::uint64_t i = 0; i < shard->documents(); ++i) {
      const auto document = shard->document(i);
      if (!train::is_validation(document.key, flags.validation_fraction)) continue;
      ++validation_documents;
      validation_tokens += document.end - document.begin;
    }
  }
  fmt::print("{:<28} {:>10} {:>14}\n", fmt::format("{} in all", files.size()), documents, tokens);
  fmt::print("for validation at a fraction of {}: {} documents, {} tokens\n", flags.validation_fraction,
             validation_documents, validation_tokens);
  for (const std::string& text : damage) fmt::print(stderr, "penstock: {}\n", printable(text));
  if (!damage.empty()) outcome.exit_code = 1;
}

}  // namespace

void add_data_command(CLI::App& app, Outcome& outcome) {
  CLI::App* command = app.add_subcommand("data", "Make token shards from files, or show those of a folder");
  command->require_subcommand(1);
  command->footer(
      "Examples:\n"
      "  penstock data make --out data --source src include --extensions .h .cpp\n"
      "  penstock data show data");

  CLI::App* make_command = command->add_subcommand("make", "Make a folder of token shards from text files");
  const auto make_flags = std::make_shared<MakeFlags>();
  make_command->add_option("--out", make_flags->out, "Folder to make")->required()->type_name("FOLDER");
  make_command
      ->add_option("--source", make_flags->sources,
                   "Files and folders, searched to the bottom (default: the C++ headers of this system and of LibTorch)")
      ->type_name("PATH...");
  make_command
      ->add_option("--extensions", make_flags->extensions,
                   "Only files with these (default: all of the given paths; those of C++ for the default ones)")
      ->type_name("X...");
  make_command->add_option("--cap-bytes", make_flags->cap_bytes, "Bytes of text at most: 16MB, 1GB (default: no cap)")
      ->transform(CLI::AsSizeValue(false))
      ->type_name("B");
  make_command->add_option("--max-file-bytes", make_flags->max_file_bytes, "Larger files are left out (default 1 MiB)")
      ->transform(CLI::AsSizeValue(false))
      ->type_name("B");
  make_command->add_option("--shard-tokens", make_flags->shard_tokens, "Tokens of a shard, about (default 2^26)")
      ->type_name("N");
  make_command->add_flag("--skip-bad-files", make_flags->skip_bad_files,
                         "Go on without unreadable, empty and binary files, and list them (default: an error)");
  make_command->add_flag("--overwrite", make_flags->overwrite, "Replace a folder that has token shards already");
  make_command->footer(
      "Tokens are bytes; a file is a document. The format is in docs/data.md.\n"
      "Examples:\n"
      "  penstock data make --out data\n"
      "  penstock data make --out data --source src include --extensions .h .cpp --cap-bytes 16MB\n"
      "Exit codes: 0 ok, 2 usage error or a bad file.");
  make_command->callback([make_flags] { make(*make_flags); });

  CLI::App* show_command = command->add_subcommand("show", "What a folder of token shards holds, and whether it is whole");
  const auto show_flags = std::make_shared<ShowFlags>();
  show_command->add_option("folder", show_flags->folder, "Folder of token shards")->required()->type_name("FOLDER");
  show_command
      ->add_option("--validation-fraction", show_flags->validation_fraction,
                   "Share of the files for validation, to count them (default 0.05)")
      ->type_name("F");
  show_command->footer(
      "Reads every byte and checks every checksum.\n"
      "Example: penstock data show data\n"
      "Exit codes: 0 ok, 1 a shard is damaged, 2 usage error or no shards.");
  show_command->callback([show_flags, &outcome] { show(*show_flags, outcome); });
}

}  // namespace penstock::cli
