// penstock generate: generates text with a trained model.
#include <fmt/format.h>
#include <torch/cuda.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/printable.h"
#include "penstock/base/quote.h"
#include "penstock/cli/common/command_line.h"
#include "penstock/cli/common/commands.h"
#include "penstock/cli/common/number_options.h"
#include "penstock/cli/tensor/use_available_cores.h"
#include "penstock/errors.h"
#include "penstock/train/data/byte_tokenizer.h"
#include "penstock/train/job/configured_data.h"
#include "penstock/train/job/load_model.h"
#include "penstock/train/job/prompt_structure.h"
#include "penstock/transformer.h"

namespace penstock::cli {

namespace {

constexpr std::int64_t kEndOfDocument = train::byte_tokenizer::kEndOfDocument;

struct GenerateFlags {
  std::string run;
  std::optional<std::string> prompt;  // none: the run's prompt
  std::string device = "auto";
  std::int64_t tokens = 0;  // 0: as configured in the run
  double temperature = 0.8;
  std::int64_t top_k = 40;
  std::uint64_t seed = 1;
};

// Prints bytes as they arrive, and multi-byte characters when they are complete. Prints invalid UTF-8 as
// numbers.
class TextPrinter {
 public:
  void add(std::int64_t token) {
    if (token >= 256) {  // not a byte
      print();
      fmt::print("<{}>", token);
      return;
    }
    const auto byte = static_cast<unsigned char>(token);
    const bool continues = (byte & 0xc0) == 0x80;
    if (!continues) print();
    waiting_ += static_cast<char>(byte);
    const auto first = static_cast<unsigned char>(waiting_[0]);
    const std::size_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc2 ? 2 : 1;
    if (waiting_.size() >= bytes) print();
  }
  // Also prints an incomplete character.
  void print() {
    fmt::print("{}", printable(waiting_));
    std::fflush(stdout);
    waiting_.clear();
  }

 private:
  std::string waiting_;
};

void run(const GenerateFlags& flags) {
  if (flags.device == "cuda" && !torch::cuda::is_available())
    throw ConfigError(
        describe("--device", "cuda, but LibTorch finds no usable GPU on this machine", "cpu or auto"));
  use_available_cores();
  const at::Device device = flags.device == "cuda" || (flags.device == "auto" && torch::cuda::is_available())
                                ? at::kCUDA
                                : at::kCPU;
  train::LoadedModel loaded = train::load_model(flags.run, device);
  if (train::tokenizer_is_unknown(loaded.config.data))
    throw ConfigError(describe(
        fmt::format("{}: generate", flags.run), "a model trained on token files", "a model trained on text",
        "Penstock does not know the tokenizer of token files; its own tokenizer has one token per byte"));
  const std::string prompt = flags.prompt.value_or(loaded.config.output.sample_prompt);
  if (prompt.empty())
    throw ConfigError(describe(flags.prompt ? "--prompt" : "output.sample_prompt of the run",
                               "an empty prompt", "at least one byte, which the model continues",
                               flags.prompt ? "leave it out to use the run's prompt" : "set --prompt"));
  const train::ModelConfig& model = loaded.config.model;
  std::vector<std::int64_t> tokens;
  for (const char each : prompt) tokens.push_back(static_cast<unsigned char>(each));
  if (const auto unknown = std::find_if(tokens.begin(), tokens.end(),
                                        [&](std::int64_t token) { return token >= model.vocabulary; });
      unknown != tokens.end())
    throw ConfigError(describe("prompt", fmt::format("the byte {}", *unknown),
                               fmt::format("bytes below the model's vocabulary of {}", model.vocabulary)));
  if (static_cast<std::int64_t>(tokens.size()) > model.context)
    fmt::print(stderr, "penstock: the prompt has {} bytes; the model uses only the last {}, its context\n",
               tokens.size(), model.context);
  const std::int64_t wanted = flags.tokens > 0                         ? flags.tokens
                              : loaded.config.output.sample_tokens > 0 ? loaded.config.output.sample_tokens
                                                                       : train::OutputConfig{}.sample_tokens;
  const train::PromptStructure structure(loaded.config, device);
  const models::GenerateOptions how{.max_tokens = wanted,
                                    .temperature = flags.temperature,
                                    .top_k = flags.top_k,
                                    .seed = flags.seed,
                                    .stop_token = kEndOfDocument,
                                    .use_cache = structure.allows_cache(),
                                    .slide = true,
                                    .metadata = structure.metadata()};
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

void add_generate_command(CLI::App& app, CommandOutcome&) {
  CLI::App* command = add_tensor_subcommand(app, "generate");
  command->footer("Example: penstock generate runs/tiny-20270131-093005 --prompt '#include <' --tokens 200");
  const auto flags = std::make_shared<GenerateFlags>();
  command->add_option("run", flags->run, "Folder of a run, or one of its checkpoints")->required();
  add_read_option(*command, "--prompt", "TEXT",
                  "Beginning of the text, at least one byte (default: output.sample_prompt of the run)",
                  [flags](const std::string&, const std::string& text) { flags->prompt = text; });
  add_whole(*command, "--tokens", flags->tokens, 1, 1 << 20,
            "Maximum number of tokens (default: output.sample_tokens of the run); beyond the context, the "
            "model sees only the last tokens, which is slower");
  add_number(*command, "--temperature", flags->temperature, {.low = 0, .high = 100},
             "Sampling temperature; 0: always the most likely token");
  add_whole(*command, "--top-k", flags->top_k, 0, 1 << 20,
            "Sample among this many of the most likely tokens; 0: all");
  add_whole(*command, "--seed", flags->seed, 0, std::numeric_limits<std::int64_t>::max(),
            "Random seed; the same seed produces the same text");
  command->add_option("--device", flags->device, "Device: auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command->callback([flags] { run(*flags); });
}

}  // namespace penstock::cli
