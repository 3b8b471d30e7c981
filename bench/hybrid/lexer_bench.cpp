// Throughput of the C++ lexer that finds structure metadata, in processor time of one core, so that other
// load matters little: on the C++ headers of this machine, on one file of 100 MB, and for the rows that a
// training run reads. Usage: lexer_bench
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "penstock/base/files.h"
#include "penstock/train/data/cpp_structure.h"
#include "penstock/train/data/make_shards.h"
#include "penstock/train/data/sampler.h"
#include "penstock/train/data/source_files.h"

namespace {

using namespace penstock::train;
namespace fs = std::filesystem;

double processor_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

void measure(const char* what, const std::vector<std::int64_t>& tokens) {
  constexpr std::size_t kAtOnce = 1 << 16;
  std::vector<TokenStructure> found(kAtOnce);
  double best = 1e30;
  std::size_t kept = 0;
  for (int repeat = 0; repeat < 3; ++repeat) {
    CppStructure structure;
    const double begin = processor_seconds();
    for (std::size_t at = 0; at < tokens.size(); at += kAtOnce) {
      const std::size_t count = std::min(kAtOnce, tokens.size() - at);
      structure.read(std::span(tokens).subspan(at, count), std::span(found).first(count));
    }
    best = std::min(best, processor_seconds() - begin);
    kept = structure.bytes();
  }
  std::printf("%-34s %7.1f MB  %7.1f MB/s  state %zu bytes\n", what, static_cast<double>(tokens.size()) / 1e6,
              static_cast<double>(tokens.size()) / best / 1e6, kept);
  std::fflush(stdout);
}

// Rows at random places, as a run reads them: lexing from the nearest kept state included.
void measure_rows(const fs::path& shards, std::int64_t context) {
  const auto data = TokenDataset::open(shards, DataSplit::All, 0);
  const Sampler sampler(data, {.context = context, .seed = 1, .cpp_structure = true});
  std::vector<TokenStructure> found(static_cast<std::size_t>(context));
  const auto rows = std::min<std::uint64_t>(4096, sampler.samples_per_epoch());
  for (const char* pass : {"first", "second"}) {
    const double begin = processor_seconds();
    for (std::uint64_t row = 0; row < rows; ++row) sampler.structure(row, found);
    const double seconds = processor_seconds() - begin;
    std::printf("rows of %5ld tokens, %-6s pass       %7.0f rows/s  %7.2f million tokens/s\n", context, pass,
                static_cast<double>(rows) / seconds,
                static_cast<double>(rows) * static_cast<double>(context) / seconds / 1e6);
  }
  std::fflush(stdout);
}

}  // namespace

int main() {
  const fs::path folder = fs::temp_directory_path() / "penstock_lexer_bench";
  penstock::remove_tree(folder);
  MakeShardsOptions options;
  options.sources.cap_bytes = 16 << 20;
  make_shards(folder, options);
  const auto data = TokenDataset::open(folder, DataSplit::All, 0);
  std::vector<std::int64_t> tokens(data->tokens()), documents(tokens.size());
  data->read(0, tokens, documents);
  measure("C++ headers", tokens);
  std::vector<std::int64_t> large;
  while (large.size() < 100'000'000)
    for (const std::int64_t token : tokens)
      if (token < 256) large.push_back(token);
  large.resize(100'000'000);
  measure("one file", large);
  large.assign(100'000'000, '(');
  measure("one file of open brackets", large);
  std::mt19937 random(1);
  for (std::int64_t& token : large) token = random() % 256;
  measure("one file of random bytes", large);
  measure_rows(folder, 256);
  measure_rows(folder, 2048);
  penstock::remove_tree(folder);
}
