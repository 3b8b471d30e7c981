// penstock data: makes token shards from files, and shows the contents of a folder of shards.
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/files.h"
#include "penstock/base/printable.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/cli/common/commands.h"
#include "penstock/cli/common/number_options.h"
#include "penstock/errors.h"
#include "penstock/train/data/bin_tokens.h"
#include "penstock/train/data/data_files.h"
#include "penstock/train/data/make_shards.h"
#include "penstock/train/data/token_dataset.h"

namespace penstock::cli {

namespace {

struct MakeFlags {
  std::string out;
  std::vector<std::string> sources;
  std::vector<std::string> extensions;
  std::uint64_t cap_bytes = 0;
  std::uint64_t max_file_bytes = 0;
  std::uint64_t shard_tokens = std::uint64_t{1} << 26;
  bool skip_bad_files = false;
  bool overwrite = false;
};

// Overwrites one line on a terminal, prints a line now and then otherwise. Prints nothing for short work.
class ProgressLine {
 public:
  void show(const train::MakeShardsProgress& progress) {
    const auto now = std::chrono::steady_clock::now();
    if (now < next_) return;
    next_ = now + (terminal_ ? std::chrono::milliseconds(200) : std::chrono::milliseconds(5000));
    const double share = progress.of_bytes == 0
                             ? 1
                             : static_cast<double>(progress.bytes) / static_cast<double>(progress.of_bytes);
    fmt::print(stderr, "{}{:3.0f} %  {} of {} files, {} of {}{}", terminal_ ? "\r" : "", 100 * share,
               progress.files, progress.of_files, format_bytes(progress.bytes),
               format_bytes(progress.of_bytes), terminal_ ? "\x1b[K" : "\n");
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
  train::MakeShardsOptions options;
  options.sources.paths.assign(flags.sources.begin(), flags.sources.end());
  options.sources.extensions = flags.extensions;
  options.sources.cap_bytes = flags.cap_bytes;
  options.sources.max_file_bytes = flags.max_file_bytes;
  options.sources.skip_bad_files = flags.skip_bad_files;
  options.shard_tokens = flags.shard_tokens;
  options.overwrite = flags.overwrite;
  train::MakeShardsResult made;
  {
    ProgressLine line;
    options.progress = [&](const train::MakeShardsProgress& progress) { line.show(progress); };
    made = train::make_shards(flags.out, options);
  }
  // Some system headers are always empty, and the user cannot fix them: only count them.
  if (!flags.sources.empty())
    for (const train::BadFile& file : made.bad)
      fmt::print(stderr, "skipped {}: {}\n", printable(file.path.string()), file.why);
  fmt::print("{}: {} of {} ({}) in {}\n", printable(flags.out), count_of(made.tokens, "token"),
             count_of(made.documents, "file"), format_bytes(made.bytes), count_of(made.shards, "shard"));
  for (const auto& file : made.cut) fmt::print("truncated by the cap: {}\n", printable(file.string()));
  if (made.bad.size() + made.too_large + made.beyond_cap > 0)
    fmt::print("left out: {} bad{}, {} beyond the cap\n", made.bad.size(),
               made.max_file_bytes == 0
                   ? ""
                   : fmt::format(", {} larger than {}", made.too_large, format_bytes(made.max_file_bytes)),
               made.beyond_cap);
}

struct ShowFlags {
  std::string path;
  std::string format = "auto";
  std::uint64_t vocabulary = 65536;
  double validation_fraction = 0.05;
};

// A file to show, and how to open it.
struct ShownFile {
  std::filesystem::path path;
  std::function<std::shared_ptr<const train::TokenSource>()> open;
  std::string token_bytes(const train::TokenSource& source) const {
    if (const auto* shard = dynamic_cast<const train::TokenShard*>(&source))
      return fmt::format("{}", shard->header().token_bytes);
    if (const auto* bin = dynamic_cast<const train::BinTokens*>(&source))
      return fmt::format("{}", bin->token_bytes());
    return "-";
  }
};

std::vector<ShownFile> shown_files(const ShowFlags& flags) {
  std::vector<ShownFile> files;
  const bool may_be_tokens = file_exists(flags.path) || flags.path.find_first_of("*?[") != std::string::npos;
  const train::DataFiles found =
      may_be_tokens && !train::has_shards(flags.path)
          ? train::find_data_files({.paths = {flags.path}, .format = flags.format, .extensions = {}})
          : train::DataFiles{};
  if (found.kind == train::DataKind::Text) {
    for (const auto& file : train::shard_files(flags.path))
      files.push_back({file, [file] { return train::TokenShard::open(file); }});
    return files;
  }
  const train::BinTokensOptions options{.headerless = found.kind == train::DataKind::Uint16,
                                        .vocabulary = flags.vocabulary,
                                        .end_of_document = {}};
  for (const auto& file : found.files)
    files.push_back({file, [file, options] { return train::BinTokens::open(file, options); }});
  return files;
}

void show(const ShowFlags& flags, CommandOutcome& outcome) {
  const std::vector<ShownFile> files = shown_files(flags);
  fmt::print("{:<28} {:>10} {:>14} {:>6} {:>10}  {}\n", "file", "documents", "tokens", "bytes", "vocabulary",
             "contents");
  std::uint64_t documents = 0;
  std::uint64_t tokens = 0;
  std::vector<std::string> damage;
  train::TokenSources sources;
  train::DocumentSplit split(flags.validation_fraction);
  for (const ShownFile& file : files) {
    const std::string name = printable(file.path.filename().string());
    std::shared_ptr<const train::TokenSource> source;
    const std::size_t damaged_before = damage.size();
    try {
      source = file.open();
      source->verify();
    } catch (const ConfigError& error) {
      damage.emplace_back(error.what());
    }
    if (!source) {
      fmt::print("{:<28} {:>10} {:>14} {:>6} {:>10}  DAMAGED\n", name, "-", "-", "-", "-");
      continue;
    }
    const bool damaged = damage.size() > damaged_before;
    // If only the tokens mark the ends of documents, documents are not counted.
    fmt::print("{:<28} {:>10} {:>14} {:>6} {:>10}  {}\n", name,
               source->ends_are_in_tokens() ? std::string("-") : fmt::format("{}", source->documents()),
               source->tokens(), file.token_bytes(*source), source->vocabulary(), damaged ? "DAMAGED" : "ok");
    documents += source->documents();
    tokens += source->tokens();
    for (std::uint64_t i = 0; i < source->documents(); ++i)
      split.count(source->document(i).end - source->document(i).begin, source->document(i).key);
    sources.push_back(std::move(source));
  }
  fmt::print("{:<28} {:>10} {:>14}\n", fmt::format("{} in total", files.size()), documents, tokens);
  split.decide();
  std::uint64_t validation_documents = 0;
  std::uint64_t validation_tokens = 0;
  for (const auto& source : sources) {
    for (std::uint64_t i = 0; i < source->documents(); ++i) {
      const std::uint64_t part = split.validation_tokens(source->document(i).end - source->document(i).begin,
                                                         source->document(i).key);
      validation_documents += part > 0 ? 1 : 0;
      validation_tokens += part;
    }
  }
  fmt::print("validation at a fraction of {}: {}, {}{}\n", flags.validation_fraction,
             count_of(validation_tokens, "token"), split.cuts() ? "the ends of " : "",
             count_of(validation_documents, "document"));
  for (const std::string& text : damage) fmt::print(stderr, "penstock: {}\n", printable(text));
  if (!damage.empty()) outcome.exit_code = 1;
}

}  // namespace

void add_data_command(CLI::App& app, CommandOutcome& outcome) {
  CLI::App* command = app.add_subcommand(
      "data", "Make token shards from files, or show the contents of shards and token files");
  command->require_subcommand(1);
  command->footer(
      "Examples:\n"
      "  penstock data make --out data --source src include --extensions .h .cpp\n"
      "  penstock data show data\n"
      "  penstock data show train.bin --format uint16");

  CLI::App* make_command = command->add_subcommand("make", "Make a folder of token shards from text files");
  const auto make_flags = std::make_shared<MakeFlags>();
  make_command->add_option("--out", make_flags->out, "Folder to create")->required()->type_name("FOLDER");
  make_command
      ->add_option(
          "--source", make_flags->sources,
          "Files and folders, searched recursively (default: the C++ headers of this system and of LibTorch)")
      ->type_name("PATH...");
  make_command
      ->add_option("--extensions", make_flags->extensions,
                   "Use only files with these extensions (default: all files of the given paths; C++ files "
                   "for the default sources)")
      ->type_name("X...");
  add_bytes(*make_command, "--cap-bytes", make_flags->cap_bytes, 0,
            "Maximum bytes of text: 16MB, 1GB (default 0: no limit)");
  add_bytes(*make_command, "--max-file-bytes", make_flags->max_file_bytes, 0,
            "Skip larger files (default 0: no limit; 1 MiB for the default sources)");
  add_whole(*make_command, "--shard-tokens", make_flags->shard_tokens, 1, std::int64_t{1} << 40,
            "Approximate tokens per shard (default 2^26)");
  make_command->add_flag("--skip-bad-files", make_flags->skip_bad_files,
                         "Skip unreadable, empty and binary files, and list them (default: fail)");
  make_command->add_flag("--overwrite", make_flags->overwrite,
                         "Replace a folder that already contains token shards");
  make_command->footer(
      "Each byte is a token; each file is a document. docs/data.md describes the format. penstock train "
      "--data makes shards itself.\n"
      "Examples:\n"
      "  penstock data make --out data\n"
      "  penstock data make --out data --source src include --extensions .h .cpp --cap-bytes 16MB\n"
      "Exit codes: 0 ok, 2 usage error or a bad file.");
  make_command->callback([make_flags] { make(*make_flags); });

  CLI::App* show_command = command->add_subcommand(
      "show", "Show the contents of a folder of token shards or of a token file, and check its integrity");
  const auto show_flags = std::make_shared<ShowFlags>();
  show_command
      ->add_option("path", show_flags->path,
                   "Folder of token shards, or a token file (or folder or pattern) of another program")
      ->required()
      ->type_name("PATH");
  show_command
      ->add_option("--format", show_flags->format,
                   "uint16: 16-bit tokens without a header (default: determined by the header)")
      ->check(CLI::IsMember({"auto", "uint16"}))
      ->type_name("F");
  add_whole(*show_command, "--vocabulary", show_flags->vocabulary, 1, 65536,
            "Vocabulary size of a file without a header; all tokens must be below it (default 65536)");
  add_number(*show_command, "--validation-fraction", show_flags->validation_fraction, {.low = 0, .high = 1},
             "Fraction held out for validation; the size of that part is shown")
      ->type_name("F");
  show_command->footer(
      "Reads every byte; checks all checksums of shards, and that tokens are below the vocabulary size.\n"
      "Examples:\n"
      "  penstock data show data\n"
      "  penstock data show fineweb_train_000001.bin\n"
      "  penstock data show train.bin --format uint16 --vocabulary 50257\n"
      "Exit codes: 0 ok, 1 a shard is damaged, 2 usage error or no shards.");
  show_command->callback([show_flags, &outcome] { show(*show_flags, outcome); });
}

}  // namespace penstock::cli
