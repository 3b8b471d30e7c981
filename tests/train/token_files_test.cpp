// Token files of other programs, detection of source kinds, and the split between training and validation.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "penstock/base/checksum.h"
#include "penstock/errors.h"
#include "penstock/train/data/bin_tokens.h"
#include "penstock/train/data/data_files.h"
#include "penstock/train/data/document_split.h"
#include "penstock/train/data/sampler.h"
#include "penstock/train/data/token_dataset.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/scratch_folder.h"
#include "tests/train/token_file_bytes.h"

namespace penstock::train {
namespace token_files_test {

namespace fs = std::filesystem;
using test::bare_file;
using test::gpt2_file;
using test::has_text;
using test::llama3_file;
using test::llmc_file;
using test::message_of;
using test::ScratchFolder;
using test::write_bytes;

using Bytes = std::vector<std::uint8_t>;

std::vector<std::int64_t> all_tokens(const TokenSource& source) {
  std::vector<std::int64_t> tokens(source.tokens());
  source.read(0, tokens);
  return tokens;
}

std::string refusal(const Bytes& bytes, const BinTokensOptions& options = {}) {
  return message_of<ConfigError>([&] { (void)BinTokens::over(bytes, "some.bin", options); });
}

TEST(BinTokens, BothHeadersOfLlmC) {
  const Bytes gpt2 = gpt2_file({50256, 0, 17, 50256});
  const auto small = BinTokens::over(gpt2, "a.bin", {});
  EXPECT_EQ(small->tokens(), 4u);
  EXPECT_EQ(small->vocabulary(), 50257u);
  EXPECT_EQ(small->token_bytes(), 2u);
  EXPECT_EQ(small->end_of_document(), 50256u);
  EXPECT_EQ(all_tokens(*small), (std::vector<std::int64_t>{50256, 0, 17, 50256}));

  const Bytes llama = llama3_file({128000, 128255, 70000});
  const auto large = BinTokens::over(llama, "b.bin", {});
  EXPECT_EQ(large->vocabulary(), 128256u);
  EXPECT_EQ(large->token_bytes(), 4u);
  EXPECT_EQ(large->end_of_document(), 128000u);
  EXPECT_EQ(all_tokens(*large), (std::vector<std::int64_t>{128000, 128255, 70000}));
  std::vector<std::int64_t> one(1);
  large->read(2, one);
  EXPECT_EQ(one[0], 70000);
  EXPECT_THROW(large->read(3, one), ValueError);
  EXPECT_THROW((void)large->document(1), ValueError);
  EXPECT_NE(small->fingerprint(), large->fingerprint());
}

TEST(BinTokens, WithoutAHeader) {
  const Bytes bytes = bare_file({3, 0, 64});
  const auto tokens = BinTokens::over(bytes, "train.bin", {.headerless = true, .vocabulary = 65});
  EXPECT_EQ(all_tokens(*tokens), (std::vector<std::int64_t>{3, 0, 64}));
  EXPECT_EQ(tokens->vocabulary(), 65u);
  EXPECT_FALSE(tokens->ends_are_in_tokens());
  EXPECT_EQ(BinTokens::over(bytes, "train.bin", {.headerless = true, .vocabulary = 1u << 20})->vocabulary(),
            65536u);
  EXPECT_TRUE(
      BinTokens::over(bytes, "train.bin", {.headerless = true, .vocabulary = 65, .end_of_document = 0})
          ->ends_are_in_tokens());
}

TEST(BinTokens, DamagedFilesAreRefusedByName) {
  struct Case {
    const char* what;
    Bytes bytes;
    const char* said;
  };
  Bytes odd = bare_file({1, 2, 3});
  odd.pop_back();
  for (const Case& each : std::vector<Case>{
           {"too few tokens", llmc_file(20240520, 1, 5, bare_file({1, 2, 3, 4})), "truncated"},
           {"too many tokens", llmc_file(20240520, 1, 3, bare_file({1, 2, 3, 4})),
            "size of the file: got 1032 bytes, expected 1030"},
           {"none", llmc_file(20240520, 1, 0, {}), "number of tokens in the header: got 0"},
           {"fewer than none", llmc_file(20240520, 1, -1, bare_file({1})),
            "number of tokens in the header: got -1"},
           {"another version", llmc_file(20240520, 2, 1, bare_file({1})),
            "version of the token file: got 2, expected 1"},
           {"the version of the other kind", llmc_file(20240801, 1, 1, bare_file({1, 0})),
            "version of the token file: got 1, expected 7"},
           {"an llm.c evaluation file", llmc_file(20240522, 1, 1, bare_file({1})), "evaluation file"},
           {"another magic number", llmc_file(20240326, 1, 1, bare_file({1})), "data.format = \"uint16\""},
           {"half a token", llmc_file(20240801, 7, 1, bare_file({1})), "truncated"},
           {"a token of no vocabulary", gpt2_file({1, 50257}),
            "token 1: got 50257, expected a number below the vocabulary of 50257"},
           {"a large token of no vocabulary", llama3_file({128256}), "token 0: got 128256"},
           {"no bytes", {}, "0 bytes"},
       }) {
    const std::string message = refusal(each.bytes);
    EXPECT_TRUE(has_text(message, "some.bin: ")) << each.what;
    EXPECT_TRUE(has_text(message, each.said)) << each.what;
  }
  EXPECT_TRUE(
      has_text(refusal(odd, {.headerless = true}), "some.bin: token file: got 5 bytes, an odd number"));
  EXPECT_TRUE(has_text(refusal({}, {.headerless = true}), "an empty file"));
  EXPECT_TRUE(has_text(refusal(gpt2_file({1, 2}), {.headerless = true}), "leave data.format out"));
  EXPECT_TRUE(has_text(refusal(bare_file({1, 257}), {.headerless = true, .vocabulary = 257}),
                       "set model.vocabulary"));
  EXPECT_TRUE(
      has_text(refusal(bare_file({1, 2}), {.headerless = true, .vocabulary = 257, .end_of_document = 257}),
               "data.end_of_document"));
}

TEST(BinTokens, EveryCutIsFound) {
  const Bytes whole = gpt2_file({1, 2, 3});
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_NE(refusal({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)}), "") << size;
}

// A large file is not read completely when it is opened; bad tokens outside the samples are found when they
// are read.
TEST(BinTokens, ABadTokenOfALargeFileIsFoundWhenItIsRead) {
  Bytes bytes(24'000'000, 0);
  const auto put = [&](std::uint64_t place, std::uint16_t token) {
    bytes[2 * place] = static_cast<std::uint8_t>(token);
    bytes[2 * place + 1] = static_cast<std::uint8_t>(token >> 8);
  };
  const BinTokensOptions options{.headerless = true, .vocabulary = 100};
  const std::uint64_t fingerprint = BinTokens::over(bytes, "large.bin", options)->fingerprint();
  for (const std::uint64_t place : {std::uint64_t{0}, std::uint64_t{11'999'999}}) {
    put(place, 100);
    EXPECT_TRUE(has_text(refusal(bytes, options), "got 100")) << place;
    put(place, 8);
    EXPECT_NE(BinTokens::over(bytes, "large.bin", options)->fingerprint(), fingerprint) << place;
    put(place, 0);
  }
  put(100'000, 100);
  const auto source = BinTokens::over(bytes, "large.bin", options);
  std::vector<std::int64_t> out(10);
  source->read(99'990, out);
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { source->read(99'991, out); }),
                       "large.bin: token 100000: got 100"));
  EXPECT_THROW(source->verify(), ConfigError);
}

TEST(BinTokens, DocumentsEndWhereTheTokensSay) {
  const Bytes bytes = gpt2_file({50256, 1, 2, 50256, 3, 50256, 50256, 4});
  const Bytes more = gpt2_file({5, 6});
  const TokenDataset dataset({BinTokens::over(bytes, "a.bin", {}), BinTokens::over(more, "b.bin", {})},
                             DataSplit::All, 0);
  std::vector<std::int64_t> tokens(10), documents(10);
  dataset.read(0, tokens, documents);
  const auto same = [&](std::size_t a, std::size_t b) { return documents[a] == documents[b]; };
  EXPECT_FALSE(same(0, 1));
  EXPECT_TRUE(same(1, 2) && same(2, 3));
  EXPECT_FALSE(same(3, 4));
  EXPECT_TRUE(same(4, 5));
  EXPECT_FALSE(same(5, 6));
  EXPECT_FALSE(same(6, 7));
  EXPECT_FALSE(same(7, 8));  // another file
  EXPECT_TRUE(same(8, 9));
  for (const std::int64_t number : documents) EXPECT_LT(number, dataset.document_numbers());
}

// Kinds of sources ------------------------------------------------------------------------------------------

std::string refused_sources(const DataFilesOptions& options) {
  return message_of<ConfigError>([&] { (void)find_data_files(options); });
}

TEST(DataFiles, KnownByTheirFirstNumberWhateverTheirName) {
  const ScratchFolder folder;
  write_bytes(folder / "b.bin", gpt2_file({1, 2}));
  write_bytes(folder / "a.bin", gpt2_file({3}));
  write_bytes(folder / "c.dat", llama3_file({3}));
  folder.write("text.txt", "words");
  EXPECT_EQ(find_data_files({.paths = {folder / "text.txt"}}).kind, DataKind::Text);
  EXPECT_EQ(find_data_files({.paths = {folder / "c.dat"}}).kind, DataKind::LlmC);
  // A list, a pattern, and each file once.
  const DataFiles list = find_data_files({.paths = {folder / "b.bin", folder / "*.bin"}});
  EXPECT_EQ(list.kind, DataKind::LlmC);
  EXPECT_EQ(list.files, (std::vector<fs::path>{folder / "b.bin", folder / "a.bin"}));
  const TokenSources sources = open_token_files(list, 257, {});
  ASSERT_EQ(sources.size(), 2u);
  EXPECT_EQ(all_tokens(*sources[0]), (std::vector<std::int64_t>{1, 2}));

  EXPECT_TRUE(
      has_text(refused_sources({.paths = {folder / "a.bin", folder / "text.txt"}}), "sources of one kind"));
  EXPECT_TRUE(
      has_text(refused_sources({.paths = {folder.path()}}), "a folder of token files and other files"));
  EXPECT_TRUE(has_text(refused_sources({.paths = {folder / "*.none"}}), "matches nothing"));
  EXPECT_EQ(find_data_files({.paths = {folder.path()}, .extensions = {".bin"}}).files.size(), 2u);
  EXPECT_EQ(find_data_files({.paths = {folder.path()}, .format = "text"}).kind, DataKind::Text);
}

TEST(DataFiles, FoldersOfTokenFiles) {
  const ScratchFolder folder;
  write_bytes(folder / "2.bin", gpt2_file({1, 2}));
  write_bytes(folder / "1.bin", gpt2_file({3}));
  folder.write(".hidden", "x");
  const DataFiles found = find_data_files({.paths = {folder.path()}});
  EXPECT_EQ(found.kind, DataKind::LlmC);
  EXPECT_EQ(found.files, (std::vector<fs::path>{folder / "1.bin", folder / "2.bin"}));
}

TEST(DataFiles, HeaderlessOnlyIfConfigured) {
  const ScratchFolder folder;
  write_bytes(folder / "train.bin", bare_file({1, 2, 3}));
  const std::string message = refused_sources({.paths = {folder / "train.bin"}});
  EXPECT_TRUE(has_text(message, "train.bin"));
  EXPECT_TRUE(has_text(message, "data.format = \"uint16\""));
  EXPECT_TRUE(has_text(refused_sources({.paths = {folder.path()}}), "data.format = \"uint16\""));
  for (const fs::path& path : {folder / "train.bin", folder.path()}) {
    const DataFiles found = find_data_files({.paths = {path}, .format = "uint16"});
    EXPECT_EQ(found.kind, DataKind::Uint16);
    EXPECT_EQ(found.files, (std::vector<fs::path>{folder / "train.bin"}));
  }
  fs::create_directory(folder / "empty");
  EXPECT_TRUE(
      has_text(refused_sources({.paths = {folder / "empty"}, .format = "uint16"}), "without token files"));
  folder.write("made/shard-00000.tokens", "x");
  EXPECT_TRUE(has_text(refused_sources({.paths = {folder / "made"}}), "data.shards"));
  EXPECT_TRUE(has_text(refused_sources({.paths = {folder / "made/shard-00000.tokens"}}), "data.shards"));
}

// Training and validation
// -----------------------------------------------------------------------------------------------

// Documents whose tokens are all different.
class Numbered final : public TokenSource {
 public:
  Numbered(const std::vector<std::uint64_t>& lengths, const std::vector<std::uint64_t>& keys,
           std::uint64_t first)
      : first_(first) {
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      documents_.push_back({tokens_, tokens_ + lengths[i], keys[i]});
      tokens_ += lengths[i];
    }
  }
  const std::string& name() const override { return name_; }
  std::uint64_t tokens() const override { return tokens_; }
  std::uint64_t vocabulary() const override { return 1u << 30; }
  std::optional<std::uint32_t> end_of_document() const override { return std::nullopt; }
  bool ends_are_in_tokens() const override { return false; }
  std::uint64_t documents() const override { return documents_.size(); }
  Document document(std::uint64_t index) const override { return documents_.at(index); }
  void read(std::uint64_t begin, std::span<std::int64_t> out) const override {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<std::int64_t>(first_ + begin + i);
  }
  void verify() const override {}
  std::uint64_t fingerprint() const override {
    return checksum64(std::to_string(first_) + " " + std::to_string(tokens_));
  }

 private:
  std::string name_ = "numbered";
  std::uint64_t first_;
  std::uint64_t tokens_ = 0;
  std::vector<Document> documents_;
};

std::vector<std::int64_t> tokens_of(const TokenSources& sources, DataSplit split, double fraction) {
  try {
    const TokenDataset dataset(sources, split, fraction);
    std::vector<std::int64_t> tokens(dataset.tokens()), documents(dataset.tokens());
    dataset.read(0, tokens, documents);
    // Neighbours in a document are neighbours in the text.
    for (std::size_t i = 0; i + 1 < tokens.size(); ++i)
      if (documents[i] == documents[i + 1]) {
        EXPECT_EQ(tokens[i] + 1, tokens[i + 1]);
      }
    return tokens;
  } catch (const ConfigError& error) {
    EXPECT_TRUE(has_text(error.what(), "data.validation_fraction"));
    return {};
  }
}

TEST(SplitProperty, EveryTokenIsOnOneSide) {
  std::mt19937_64 random(20261117);
  int cut = 0, whole = 0;
  for (int trial = 0; trial < 600; ++trial) {
    const double fraction = std::vector<double>{0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.9}[random() % 7];
    const std::size_t count = 1 + random() % (trial % 3 == 0 ? 150 : 6);
    const std::uint64_t longest = std::vector<std::uint64_t>{1, 3, 50, 600}[random() % 4];
    std::vector<std::uint64_t> lengths, keys;
    for (std::size_t i = 0; i < count; ++i) {
      lengths.push_back(1 + random() % longest);
      keys.push_back(random());
    }
    // Over two sources.
    const std::size_t half = random() % (count + 1);
    TokenSources sources;
    std::uint64_t first = 0;
    for (const auto& [begin, end] : {std::pair{std::size_t{0}, half}, std::pair{half, count}}) {
      if (begin == end) continue;
      const auto part = [&](const std::vector<std::uint64_t>& all) {
        return std::vector<std::uint64_t>(all.begin() + static_cast<std::ptrdiff_t>(begin),
                                          all.begin() + static_cast<std::ptrdiff_t>(end));
      };
      sources.push_back(std::make_shared<Numbered>(part(lengths), part(keys), first));
      first += sources.back()->tokens();
    }
    const std::vector<std::int64_t> training = tokens_of(sources, DataSplit::Training, fraction),
                                    validation = tokens_of(sources, DataSplit::Validation, fraction);
    std::vector<std::int64_t> both = training;
    both.insert(both.end(), validation.begin(), validation.end());
    std::sort(both.begin(), both.end());
    ASSERT_EQ(both.size(), first) << "trial " << trial;
    for (std::size_t i = 0; i < both.size(); ++i)
      ASSERT_EQ(both[i], static_cast<std::int64_t>(i)) << "trial " << trial;
    // Exactly the requested number of tokens, or whole documents close to it.
    const double wanted = fraction * static_cast<double>(first);
    const auto got = static_cast<double>(validation.size());
    DocumentSplit split(fraction);
    for (std::size_t i = 0; i < count; ++i) split.count(lengths[i], keys[i]);
    split.decide();
    (split.cuts() ? cut : whole)++;
    if (split.cuts()) {
      EXPECT_EQ(got, std::floor(wanted)) << "trial " << trial;
    } else {
      EXPECT_GE(got, wanted / 2) << "trial " << trial;
      EXPECT_LE(got, wanted * 2) << "trial " << trial;
    }
    EXPECT_EQ(tokens_of(sources, DataSplit::Validation, fraction), validation);
  }
  EXPECT_GT(cut, 100);
  EXPECT_GT(whole, 100);
}

TEST(DataSplit, OneDocumentIsCutAtItsEnd) {
  const TokenSources sources{
      std::make_shared<Numbered>(std::vector<std::uint64_t>{1000}, std::vector<std::uint64_t>{0}, 0)};
  const TokenDataset training(sources, DataSplit::Training, 0.05),
      validation(sources, DataSplit::Validation, 0.05);
  EXPECT_EQ(training.tokens(), 950u);
  EXPECT_EQ(validation.tokens(), 50u);
  EXPECT_NE(training.fingerprint(), validation.fingerprint());
  std::vector<std::int64_t> token(1), document(1);
  validation.read(0, token, document);
  EXPECT_EQ(token[0], 950);
}

TEST(DataSplit, TooLittleForASampleSaysWhichFractionWouldDo) {
  const TokenSources sources{
      std::make_shared<Numbered>(std::vector<std::uint64_t>{1000}, std::vector<std::uint64_t>{0}, 0)};
  const auto sampler = [&](std::int64_t context) {
    (void)Sampler(std::make_shared<const TokenDataset>(sources, DataSplit::Validation, 0.05),
                  {.context = context, .seed = 1});
  };
  sampler(49);
  const std::string message = message_of<ConfigError>([&] { sampler(64); });
  EXPECT_TRUE(
      has_text(message, "validation tokens of numbered: got 50, expected more than the context of 64"));
  EXPECT_TRUE(has_text(message, "raise data.validation_fraction to 0.065"));
  // The suggested fraction is sufficient.
  (void)Sampler(std::make_shared<const TokenDataset>(sources, DataSplit::Validation, 0.065),
                {.context = 64, .seed = 1});
}

// Samples
// ----------------------------------------------------------------------------------------------------------------

// A restarted run opens the files again: sample k and the fingerprint are unchanged.
TEST(TokenFileSamples, AreTheSameAfterAnotherStart) {
  const ScratchFolder folder;
  std::mt19937 random(5);
  std::vector<std::uint32_t> gpt2, llama;
  for (int i = 0; i < 5000; ++i) {
    gpt2.push_back(random() % 40 == 0 ? 50256 : random() % 50256);
    llama.push_back(random() % 40 == 0 ? 128000 : random() % 128000);
  }
  write_bytes(folder / "gpt2.bin", gpt2_file(gpt2));
  write_bytes(folder / "llama.bin", llama3_file(llama));
  write_bytes(folder / "bare.dat", bare_file(gpt2));
  struct Case {
    const char* file;
    const char* format;
    std::int64_t end;
  };
  for (const Case& each :
       {Case{"gpt2.bin", "auto", 50256}, Case{"llama.bin", "auto", 128000}, Case{"bare.dat", "uint16", -1}}) {
    const auto sampler = [&](DataSplit split) {
      const TokenSources sources = open_token_files(
          find_data_files({.paths = {folder / each.file}, .format = each.format}), 50304, {});
      return Sampler(std::make_shared<const TokenDataset>(sources, split, 0.1),
                     {.context = 32, .seed = 9, .shuffle = split == DataSplit::Training});
    };
    const Sampler before = sampler(DataSplit::Training), after = sampler(DataSplit::Training);
    EXPECT_EQ(before.dataset().fingerprint(), after.dataset().fingerprint());
    EXPECT_NE(before.dataset().fingerprint(), sampler(DataSplit::Validation).dataset().fingerprint());
    Batch whole, part;
    before.fill(0, 300, whole);  // more than an epoch
    for (std::uint64_t position = 0; position < 300; position += 50) {
      after.fill(position, 50, part);
      const auto same = [&](const std::vector<std::int64_t>& all, const std::vector<std::int64_t>& some) {
        return std::equal(some.begin(), some.end(), all.begin() + static_cast<std::ptrdiff_t>(position * 32));
      };
      EXPECT_TRUE(same(whole.tokens, part.tokens) && same(whole.targets, part.targets) &&
                  same(whole.documents, part.documents))
          << each.file << " from " << position;
    }
    // Targets do not cross the end of a document, and are the next tokens elsewhere.
    std::int64_t ignored = 0;
    for (std::size_t sample = 0; sample < 300; ++sample)
      for (std::size_t i = 0; i + 1 < 32; ++i) {
        const std::size_t place = sample * 32 + i;
        const bool ends = whole.documents[place] != whole.documents[place + 1];
        EXPECT_EQ(whole.targets[place], ends ? kIgnored : whole.tokens[place + 1]);
        if (whole.tokens[place] == each.end) {
          EXPECT_TRUE(ends);
        }
        ignored += ends;
      }
    if (each.end >= 0) {
      EXPECT_GT(ignored, 100);
    } else {
      EXPECT_LT(ignored, 20);  // only where the ring wraps around
    }
  }
}

}  // namespace token_files_test
}  // namespace penstock::train
