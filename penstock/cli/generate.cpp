// penstock generate: text from a trained model.
#include <fmt/format.h>
#include <torch/cuda.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "penstock/base/errors.h"
#include "penstock/base/printable.h"
#include "penstock/cli/commands.h"
#include "penstock/models/generate.h"
#include "penstock/train/byte_tokenizer.h"
#include "penstock/train/load_model.h"

namespace penstock::cli {

namespace {

constexpr std::int64_t kEndOfDocument = train::byte_tokenizer::kEndOfDocument;

struct GenerateFlags {
  std::string run;
  std::string prompt;
  std::string device = "auto";
  std::int64_t tokens = 0;
  double temperature = 0.8;
  std::int64_t top_k = 40;
  std::uint64_t seed = 1;
};

// Prints bytes as they come, a character of several bytes when it is whole. Bytes that make no text are shown as their numbers.
class TextPrinter {
 public:
  void add(std::int64_t token) {
    const auto byte = static_cast<unsigned char>(token);
    const bool continues = (byte & 0xc0) == 0x80;
    if (!continues) print();
    waiting_ += static_cast<char>(byte);
    const auto first = static_cast<unsigned char>(waiting_[0]);
    const std::size_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc2 ? 2 : 1;
    if (waiting_.size() >= bytes) print();
  }
  // What waits for the rest of its character, too.
  void print() {
    fmt::print("{}", printable(waiting_));
    std::fflush(stdout);
    waiting_.clear();
  }

 private:
  std::string waiting_;
};

void run(const GenerateFlags& flags) {
  if (flags.device == "cuda" && !torch::cuda::is_available()) throw ConfigError(describe("--device", "cuda, but this machine has no GPU that LibTorch can use", "cpu or auto"));
  const at::Device device = flags.device == "cuda" || (flags.device == "auto" && torch::cuda::is_available()) ? at::kCUDA : at::kCPU;
  train::LoadedModel loaded = train::load_model(flags.run, device);
  const std::string prompt = flags.prompt.empty() ? loaded.config.output.sample_prompt : flags.prompt;
  std::vector<std::int64_t> tokens;
  for (const char each : prompt) tokens.push_back(static_cast<unsigned char>(each));
  const std::int64_t room = loaded.config.model.context - static_cast<std::int64_t>(tokens.size());
  if (tokens.empty() || room < 1)
    throw ConfigError(describe("prompt", fmt::format("{} bytes", tokens.size()), fmt::format("1 to {} of a model whose context is {}", loaded.config.model.context - 1, loaded.config.model.context), "shorten it"));
  const std::int64_t wanted = flags.tokens > 0 ? flags.tokens : loaded.config.output.sample_tokens;
  const models::GenerateOptions how{.max_tokens = std::min(wanted, room), .temperature = flags.temperature, .top_k = flags.top_k, .seed = flags.seed, .stop_token = kEndOfDocument, .use_cache = true};
  fmt::print("{}", printable(prompt));
  TextPrinter printer;
  const at::Tensor start = at::tensor(tokens, at::kLong).unsqueeze(0).to(device);
  models::generate(*loaded.model, start, how, [&](const std::vector<std::int64_t>& next, std::int64_t) {
    if (next[0] == kEndOfDocument) return false;
    printer.add(next[0]);
    return true;
  });
  printer.print();
  fmt::print("\n");
}

}  // namespace

void print_sample(const std::string& run_folder) {
  GenerateFlags flags;
  flags.run = run_folder;
  run(flags);
}

void add_generate_command(CLI::App& app, Outcome&) {
  CLI::App* command = app.add_subcommand("generate", "Text from a model that penstock train has made");
  command->footer("Example: penstock generate runs/tiny-20270131-093005 --prompt '#include <' --tokens 200");
  const auto flags = std::make_shared<GenerateFlags>();
  command->add_option("run", flags->run, "Folder of a run, or one of its checkpoints")->required();
  command->add_option("--prompt", flags->prompt, "What the text begins with (default: output.sample_prompt of the run)");
  command->add_option("--tokens", flags->tokens, "How many at most (default: output.sample_tokens of the run, as far as the context reaches)")->check(CLI::Range(1, 1 << 20));
  command->add_option("--temperature", flags->temperature, "0: always the most likely token")->check(CLI::Range(0.0, 100.0))->capture_default_str();
  command->add_option("--top-k", flags->top_k, "Only among so many of the most likely tokens; 0: all")->check(CLI::Range(0, 1 << 20))->capture_default_str();
  command->add_option("--seed", flags->seed, "The same seed gives the same text")->capture_default_str();
  command->add_option("--device", flags->device, "auto, cpu or cuda")->check(CLI::IsMember({"auto", "cpu", "cuda"}))->capture_default_str();
  command->callback([flags] { run(*flags); });
}

}  // namespace penstock::cli
