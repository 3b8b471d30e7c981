// Checksums, tokens, shards, datasets, and their source files.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#ifdef PENSTOCK_HAVE_RAPIDCHECK
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>
#endif

#include "penstock/base/checksum.h"
#include "penstock/errors.h"
#include "penstock/train/data/byte_tokenizer.h"
#include "penstock/train/data/make_shards.h"
#include "penstock/train/data/source_files.h"
#include "penstock/train/data/token_dataset.h"
#include "penstock/train/data/token_shard.h"
#include "penstock/train/data/token_shard_writer.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/scratch_folder.h"

namespace penstock::train {
namespace data_test {

namespace fs = std::filesystem;
using test::has_text;
using test::message_of;
using test::read_bytes;
using test::ScratchFolder;
using test::write_bytes;

TEST(Checksum, KnownValuesOfXxh64) {
  EXPECT_EQ(checksum64(""), 0xEF46DB3751D8E999ULL);
  EXPECT_EQ(checksum64("a"), 0xD24EC4F1A98C6E5BULL);
  EXPECT_EQ(checksum64("abc"), 0x44BC2CF5AD770999ULL);
}

TEST(Checksum, OwnImplementationMatches) {
  std::vector<std::uint8_t> bytes;
  for (int size = 0; size < 200; ++size) {
    EXPECT_EQ(plain_checksum64(bytes), checksum64(bytes)) << size;
    bytes.push_back(static_cast<std::uint8_t>(size * 37 + 11));
  }
}

TEST(ByteTokenizer, BytesAndBack) {
  std::string all(256, '\0');
  std::iota(all.begin(), all.end(), '\0');
  const auto tokens = byte_tokenizer::encode(all);
  ASSERT_EQ(tokens.size(), 256U);
  EXPECT_EQ(tokens[255], 255U);
  std::vector<std::int64_t> wide(tokens.begin(), tokens.end());
  wide.push_back(byte_tokenizer::kEndOfDocument);
  EXPECT_EQ(byte_tokenizer::decode(wide), all);
  EXPECT_EQ(byte_tokenizer::decode(std::vector<std::int64_t>{65, 300, 66}),
            "A\xEF\xBF\xBD"
            "B");
  EXPECT_TRUE(has_text(
      message_of<ValueError>([] { (void)byte_tokenizer::decode(std::vector<std::int64_t>{-100}); }), "-100"));
}

using Documents = std::vector<std::vector<std::uint32_t>>;

fs::path write_shard(const fs::path& path, const Documents& documents, const TokenShardOptions& options) {
  TokenShardWriter writer(path, options);
  std::uint64_t key = 1000;
  for (const auto& document : documents) writer.add_document(document, key++);
  writer.finish();
  return path;
}

std::vector<std::int64_t> all_tokens(const TokenShard& shard) {
  std::vector<std::int64_t> tokens(shard.tokens());
  shard.read(0, tokens);
  return tokens;
}

TEST(TokenShard, ReadsWhatWasWritten) {
  const ScratchFolder folder;
  for (const std::uint64_t vocabulary : {256ULL, 257ULL, 65536ULL, 65537ULL, 4294967296ULL}) {
    const auto eod = static_cast<std::uint32_t>(vocabulary - 1);
    const auto shard =
        TokenShard::open(write_shard(folder / "a.tokens", {{1, 2, 3}, {}, {eod - 1, 0}},
                                     {.vocabulary = vocabulary, .end_of_document = eod, .block_bytes = 64}));
    EXPECT_EQ(shard->header().token_bytes, vocabulary <= 256 ? 1U : vocabulary <= 65536 ? 2U : 4U);
    EXPECT_EQ(all_tokens(*shard), (std::vector<std::int64_t>{1, 2, 3, eod, eod, eod - 1, 0, eod}));
    ASSERT_EQ(shard->documents(), 3U);
    EXPECT_EQ(shard->document(1).begin, 4U);
    EXPECT_EQ(shard->document(1).end, 5U);
    EXPECT_EQ(shard->document(1).key, 1001U);
    EXPECT_EQ(shard->document_of(3), 0U);
    EXPECT_EQ(shard->document_of(4), 1U);
    EXPECT_EQ(shard->document_of(7), 2U);
    shard->verify();
  }
}

TEST(TokenShard, RefusesWhatIsOutside) {
  const ScratchFolder folder;
  const auto shard = TokenShard::open(
      write_shard(folder / "a.tokens", {{1, 2, 3}}, {.vocabulary = 257, .end_of_document = 256}));
  std::vector<std::int64_t> out(3);
  EXPECT_THROW(shard->read(2, out), ValueError);
  EXPECT_THROW(shard->read(~std::uint64_t{0}, out), ValueError);
  EXPECT_THROW((void)shard->document(1), ValueError);
  EXPECT_THROW((void)shard->document_of(4), ValueError);
  shard->read(4, {});
}

TEST(TokenShard, EveryChangedByteIsFound) {
  const ScratchFolder folder;
  const auto path = write_shard(folder / "a.tokens", {{1, 2, 3}, std::vector<std::uint32_t>(50, 7), {9}},
                                {.vocabulary = 257, .end_of_document = 256, .block_bytes = 64});
  const auto good = read_bytes(path);
  for (std::size_t i = 0; i < good.size(); ++i) {
    auto bytes = good;
    bytes[i] ^= 0x10;
    EXPECT_THROW(TokenShard::over(bytes, "memory")->verify(), ConfigError) << "byte " << i;
  }
}

TEST(TokenShard, EveryOtherLengthIsFound) {
  const ScratchFolder folder;
  const auto path =
      write_shard(folder / "a.tokens", {{1, 2, 3}, {9}}, {.vocabulary = 257, .end_of_document = 256});
  const auto good = read_bytes(path);
  for (std::size_t size = 0; size < good.size(); ++size) {
    write_bytes(folder / "cut.tokens", {good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size)});
    EXPECT_THROW((void)TokenShard::open(folder / "cut.tokens"), ConfigError) << size;
  }
  auto longer = good;
  longer.push_back(0);
  write_bytes(folder / "cut.tokens", longer);
  const std::string message = message_of<ConfigError>([&] { (void)TokenShard::open(folder / "cut.tokens"); });
  EXPECT_TRUE(has_text(message, "cut.tokens"));
  EXPECT_TRUE(has_text(message, "size of the file"));
}

TEST(TokenShard, DamageIsFoundWhenItIsReadAndNamesThePlace) {
  const ScratchFolder folder;
  const auto path = write_shard(folder / "a.tokens", {std::vector<std::uint32_t>(200, 7)},
                                {.vocabulary = 257, .end_of_document = 256, .block_bytes = 64});
  auto bytes = read_bytes(path);
  bytes[kShardHeaderBytes + 2 * 64 + 5] ^= 1;  // block 2: tokens 64 to 95
  const auto shard = TokenShard::over(bytes, "memory");
  std::vector<std::int64_t> out(64);
  shard->read(0, out);
  const std::string message = message_of<ConfigError>([&] { shard->read(1, out); });
  EXPECT_TRUE(has_text(message, "memory: bytes 200 to 263 are damaged"));
  EXPECT_TRUE(has_text(message, "penstock data make"));
}

// Headers with valid checksums whose fields contradict the file or each other.
TEST(TokenShard, InconsistentHeadersAreRefused) {
  const ScratchFolder folder;
  const auto path =
      write_shard(folder / "a.tokens", {{1, 2, 3}, {9}}, {.vocabulary = 257, .end_of_document = 256});
  const auto good = read_bytes(path);
  const TokenShardHeader header = decode_shard_header(good, "a");
  const std::uint64_t huge = ~std::uint64_t{0};
  std::vector<TokenShardHeader> lies;
  const auto lie = [&](auto change) { change(lies.emplace_back(header)); };
  lie([](auto& h) { h.token_bytes = 0; });
  lie([](auto& h) { h.token_bytes = 3; });
  lie([](auto& h) { h.token_bytes = 1; });
  lie([](auto& h) { h.vocabulary = 0; });
  lie([&](auto& h) { h.vocabulary = huge; });
  lie([](auto& h) { h.end_of_document = 257; });
  lie([](auto& h) { h.tokens = 0; });
  lie([&](auto& h) { h.tokens = huge; });
  lie([](auto& h) { h.tokens = kMostShardTokens; });
  lie([](auto& h) { h.tokens = 5; });
  lie([](auto& h) { h.documents = 0; });
  lie([](auto& h) { h.documents = 3; });
  lie([&](auto& h) { h.documents = huge; });
  lie([](auto& h) { h.block_bytes = 0; });
  lie([](auto& h) { h.block_bytes = 100; });
  lie([&](auto& h) { h.block_bytes = std::uint64_t{1} << 63; });
  lie([](auto& h) { h.table_checksum ^= 1; });
  for (std::size_t i = 0; i < lies.size(); ++i) {
    auto bytes = good;
    encode_shard_header(lies[i], std::span(bytes).first<kShardHeaderBytes>());
    EXPECT_THROW((void)TokenShard::over(bytes, "memory"), ConfigError) << "lie " << i;
  }
}

TEST(TokenShardWriter, WhatItRefuses) {
  const ScratchFolder folder;
  EXPECT_THROW(TokenShardWriter(folder / "a.tokens", {.vocabulary = 0}), ValueError);
  EXPECT_THROW(TokenShardWriter(folder / "a.tokens", {.vocabulary = 257, .end_of_document = 257}),
               ValueError);
  EXPECT_THROW(
      TokenShardWriter(folder / "a.tokens", {.vocabulary = 257, .end_of_document = 256, .token_bytes = 1}),
      ValueError);
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] {
                         TokenShardWriter(folder / "none" / "a.tokens",
                                          {.vocabulary = 257, .end_of_document = 256});
                       }),
                       "No such file"));
  TokenShardWriter writer(folder / "a.tokens", {.vocabulary = 257, .end_of_document = 256});
  EXPECT_THROW(writer.add_document(std::vector<std::uint32_t>{257}, 0), ValueError);
  EXPECT_THROW(writer.add_document(std::vector<std::uint32_t>{256}, 0), ValueError);
  EXPECT_EQ(writer.tokens(), 0U);
  EXPECT_THROW(writer.finish(), StateError);
  EXPECT_THROW(writer.end_document(0), StateError);
  writer.add_tokens(std::vector<std::uint32_t>{1});
  EXPECT_TRUE(has_text(message_of<StateError>([&] { writer.finish(); }), "inside a document"));
}

TEST(TokenShardWriter, NothingIsSeenBeforeTheEnd) {
  const ScratchFolder folder;
  {
    TokenShardWriter writer(folder / "a.tokens", {.vocabulary = 257, .end_of_document = 256});
    writer.add_document(std::vector<std::uint32_t>{1}, 0);
    EXPECT_FALSE(fs::exists(folder / "a.tokens"));
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));  // an abandoned writer leaves nothing
}

TEST(TokenShard, ThreadsReadTheSame) {
  const ScratchFolder folder;
  const auto shard =
      TokenShard::open(write_shard(folder / "a.tokens", {std::vector<std::uint32_t>(5000, 7)},
                                   {.vocabulary = 257, .end_of_document = 256, .block_bytes = 64}));
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { shard->verify(); });
  for (auto& thread : threads) thread.join();
}

TEST(TokenDataset, JoinsShardsAndSplitsByKey) {
  const ScratchFolder folder;
  write_shard(folder / "b.tokens", {{5}, {6, 7}}, {.vocabulary = 257, .end_of_document = 256});
  write_shard(folder / "a.tokens", {{1, 2}, {3}}, {.vocabulary = 257, .end_of_document = 256});
  const auto dataset = TokenDataset::open(folder.path(), DataSplit::All, 0);
  EXPECT_EQ(dataset->documents(), 4U);
  std::vector<std::int64_t> tokens(10);
  std::vector<std::int64_t> documents(10);
  dataset->read(0, tokens, documents);
  EXPECT_EQ(tokens, (std::vector<std::int64_t>{1, 2, 256, 3, 256, 5, 256, 6, 7, 256}));
  EXPECT_EQ(documents, (std::vector<std::int64_t>{0, 0, 0, 1, 1, 2, 2, 3, 3, 3}));
  dataset->read(4, std::span(tokens).first(2), std::span(documents).first(2));
  EXPECT_EQ(tokens[0], 256);
  EXPECT_EQ(tokens[1], 5);
  EXPECT_EQ(documents[1], 2);
  EXPECT_THROW(dataset->read(9, std::span(tokens).first(2), std::span(documents).first(2)), ValueError);
  // Keys this small would put everything into validation, so documents are cut.
  const auto training = TokenDataset::open(folder.path(), DataSplit::Training, 0.3);
  const auto validation = TokenDataset::open(folder.path(), DataSplit::Validation, 0.3);
  EXPECT_EQ(training->tokens(), 7U);
  EXPECT_EQ(validation->tokens(), 3U);
  EXPECT_EQ(validation->tokens_of_all_splits(), 10U);
  EXPECT_TRUE(has_text(
      message_of<ConfigError>([&] { (void)TokenDataset::open(folder.path(), DataSplit::Training, 1); }),
      "lower data.validation_fraction"));
  EXPECT_TRUE(has_text(
      message_of<ConfigError>([&] { (void)TokenDataset::open(folder.path(), DataSplit::Validation, 0.01); }),
      "raise data.validation_fraction"));
  EXPECT_TRUE(has_text(
      message_of<ConfigError>([&] { (void)TokenDataset::open(folder.path(), DataSplit::Validation, 0); }),
      "raise data.validation_fraction"));
  EXPECT_NE(dataset->fingerprint(), validation->fingerprint());
  EXPECT_NE(TokenDataset::open(folder.path(), DataSplit::Validation, 0.4)->fingerprint(),
            validation->fingerprint());
  EXPECT_EQ(dataset->fingerprint(), TokenDataset::open(folder.path(), DataSplit::All, 0)->fingerprint());
}

TEST(TokenDataset, RefusesFoldersWithoutShards) {
  const ScratchFolder folder;
  EXPECT_TRUE(
      has_text(message_of<ConfigError>([&] { (void)TokenDataset::open(folder.path(), DataSplit::All, 0); }),
               "penstock data make"));
  EXPECT_TRUE(
      has_text(message_of<ConfigError>([&] { (void)TokenDataset::open(folder / "no", DataSplit::All, 0); }),
               "No such file"));
  write_shard(folder / "a.tokens", {{1}}, {.vocabulary = 257, .end_of_document = 256});
  write_shard(folder / "b.tokens", {{1}}, {.vocabulary = 300, .end_of_document = 256});
  EXPECT_TRUE(
      has_text(message_of<ConfigError>([&] { (void)TokenDataset::open(folder.path(), DataSplit::All, 0); }),
               "b.tokens: vocabulary"));
}

TEST(DataSplit, IsMonotoneInTheFraction) {
  for (const std::uint64_t key : {0ULL, 1ULL << 40, 1ULL << 63, ~0ULL}) {
    EXPECT_FALSE(is_validation(key, 0));
    EXPECT_TRUE(is_validation(key, 1));
  }
  EXPECT_TRUE(is_validation((1ULL << 63) - 1, 0.5));
  EXPECT_FALSE(is_validation(1ULL << 63, 0.5));
  EXPECT_THROW((void)is_validation(0, 1.5), ValueError);
  EXPECT_THROW((void)is_validation(0, std::nan("")), ValueError);
}

// Sources
// ------------------------------------------------------------------------------------------------------------

std::vector<std::string> names(const SourceList& list) {
  std::vector<std::string> result;
  for (const auto& file : list.files) result.push_back(file.relative);
  return result;
}

TEST(Sources, FoundSortedFilteredAndOnce) {
  const ScratchFolder folder;
  folder.write("src/b.h", "b");
  folder.write("src/a/x.cpp", "x");
  folder.write("src/a/y.H", "y");
  folder.write("src/plain", "p");
  folder.write("src/readme.md", "r");
  fs::create_directory_symlink(folder / "src", folder / "src/a/loop");
  fs::create_symlink(folder / "src/b.h", folder / "src/z.h");
  SourceOptions options;
  options.paths = {folder / "src", folder / "src/a"};
  EXPECT_EQ(names(find_sources(options)),
            (std::vector<std::string>{"a/x.cpp", "a/y.H", "b.h", "plain", "readme.md"}));
  options.extensions = {"h", ""};
  const SourceList list = find_sources(options);
  EXPECT_EQ(names(list), (std::vector<std::string>{"a/y.H", "b.h", "plain"}));
  EXPECT_EQ(list.bytes, 3U);
  EXPECT_EQ(list.files[1].key, checksum64("b.h"));  // of the relative path: the same on every machine
  options.paths = {folder / "src/readme.md"};
  EXPECT_EQ(names(find_sources(options)), (std::vector<std::string>{"readme.md"}));
}

TEST(Sources, BadFilesAreErrorsWithTheirNamesUnlessSkipped) {
  struct Case {
    const char* name;
    const char* why;
  };
  for (const Case& item : {Case{"empty.h", "an empty file"}, Case{"gone.h", "No such file"},
                           Case{"pipe.h", "not a regular file"}}) {
    const ScratchFolder folder;
    folder.write("good.h", "g");
    if (item.name == std::string("empty.h")) folder.write("empty.h", "");
    if (item.name == std::string("gone.h")) fs::create_symlink("/nowhere/at/all", folder / "gone.h");
    if (item.name == std::string("pipe.h")) {
      ASSERT_EQ(std::system(("mkfifo '" + (folder / "pipe.h").string() + "'").c_str()), 0);
    }
    SourceOptions options;
    options.paths = {folder.path()};
    const std::string message = message_of<ConfigError>([&] { (void)find_sources(options); });
    EXPECT_TRUE(has_text(message, item.name));
    EXPECT_TRUE(has_text(message, item.why));
    EXPECT_TRUE(has_text(message, "skip_bad_files"));
    options.skip_bad_files = true;
    const SourceList list = find_sources(options);
    EXPECT_EQ(names(list), (std::vector<std::string>{"good.h"}));
    ASSERT_EQ(list.bad.size(), 1U);
    EXPECT_EQ(list.bad[0].path.filename(), item.name);
  }
}

TEST(Sources, AGivenPathMustExist) {
  SourceOptions options;
  options.paths = {"/nowhere/at/all"};
  options.skip_bad_files = true;
  EXPECT_TRUE(
      has_text(message_of<ConfigError>([&] { (void)find_sources(options); }), "/nowhere/at/all: source"));
}

TEST(Sources, LimitsOfSize) {
  const ScratchFolder folder;
  for (int i = 0; i < 50; ++i) folder.write("f" + std::to_string(i), std::string(100, 'a'));
  folder.write("large", std::string(1001, 'a'));
  SourceOptions options;
  options.paths = {folder.path()};
  options.max_file_bytes = 1000;
  options.cap_bytes = 1050;
  const SourceList list = find_sources(options);
  EXPECT_EQ(list.files.size(), 10U);
  EXPECT_EQ(list.bytes, 1000U);
  EXPECT_EQ(list.too_large, 1U);
  EXPECT_EQ(list.beyond_cap, 40U);
  EXPECT_TRUE(std::is_sorted(list.files.begin(), list.files.end(),
                             [](const auto& a, const auto& b) { return a.relative < b.relative; }));
  EXPECT_EQ(names(find_sources(options)), names(list));
  // If no file fits, one is truncated.
  options.cap_bytes = 10;
  const SourceList cut = find_sources(options);
  ASSERT_EQ(cut.files.size(), 1U);
  EXPECT_TRUE(cut.files[0].cut);
  EXPECT_EQ(cut.bytes, 10U);
  EXPECT_EQ(cut.beyond_cap, 49U);
  std::string text;
  read_source(cut.files[0], [&](std::string_view piece) { text += piece; });
  EXPECT_EQ(text, std::string(10, 'a'));
}

TEST(Sources, GivenSourcesHaveNoLimit) {
  const ScratchFolder folder;
  folder.write("large.txt", std::string((std::size_t{5} << 20) + 3, 'a'));
  SourceOptions options;
  options.paths = {folder / "*.txt"};
  const SourceList list = find_sources(options);
  ASSERT_EQ(list.files.size(), 1U);
  EXPECT_EQ(list.bytes, (5U << 20) + 3);
  EXPECT_EQ(list.files[0].relative, "large.txt");
  std::size_t largest = 0, all = 0;
  read_source(list.files[0], [&](std::string_view piece) {
    largest = std::max(largest, piece.size());
    all += piece.size();
  });
  EXPECT_EQ(all, list.bytes);
  EXPECT_LE(largest, std::size_t{1} << 20);
  options.paths = {folder / "*.none"};
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { (void)find_sources(options); }),
                       "a pattern that matches nothing"));
}

TEST(Sources, DefaultSourcesExist) {
  SourceOptions options;
  options.cap_bytes = 1 << 20;
  const SourceList list = find_sources(options);
  EXPECT_GT(list.files.size(), 20U);
  EXPECT_GT(list.bytes, 900000U);
}

// Making
// ---------------------------------------------------------------------------------------------------------------

TEST(MakeShards, FilesBecomeDocuments) {
  const ScratchFolder folder;
  folder.write("src/a.h", "int a;");
  folder.write("src/b.h", "int bb;");
  folder.write("src/c.h", "c");
  MakeShardsOptions options;
  options.sources.paths = {folder / "src"};
  options.shard_tokens = 8;
  std::uint64_t calls = 0;
  options.progress = [&](const MakeShardsProgress& progress) { EXPECT_EQ(progress.files, ++calls); };
  const MakeShardsResult made = make_shards(folder / "out/", options);
  EXPECT_EQ(calls, 3U);
  EXPECT_EQ(made.shards, 2U);
  EXPECT_EQ(made.documents, 3U);
  EXPECT_EQ(made.tokens, 6U + 7 + 1 + 3);
  const auto dataset = TokenDataset::open(folder / "out", DataSplit::All, 0);
  std::vector<std::int64_t> tokens(dataset->tokens());
  std::vector<std::int64_t> documents(dataset->tokens());
  dataset->read(0, tokens, documents);
  EXPECT_EQ(byte_tokenizer::decode(tokens), "int a;int bb;c");
  EXPECT_EQ(documents.back(), 2);

  // Existing shards are replaced only with overwrite; the same files produce the same bytes.
  EXPECT_TRUE(
      has_text(message_of<ConfigError>([&] { make_shards(folder / "out", options); }), "--overwrite"));
  const auto before = read_bytes(folder / "out/shard-00000.tokens");
  options.overwrite = true;
  options.progress = {};
  make_shards(folder / "out", options);
  EXPECT_EQ(read_bytes(folder / "out/shard-00000.tokens"), before);
  folder.write("out/notes.txt", "mine");
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { make_shards(folder / "out", options); }), "notes.txt"));
}

TEST(MakeShards, ALargeFileIsReadInPieces) {
  const ScratchFolder folder;
  std::string text;
  for (int i = 0; i < 10000; ++i) text += std::to_string(i) + "\n";
  while (text.size() < (std::size_t{17} << 20)) text += text;
  text.resize((std::size_t{17} << 20) + 5);
  folder.write("large.txt", text);
  MakeShardsOptions options;
  options.sources.paths = {folder / "large.txt"};
  std::vector<std::uint64_t> bytes;
  options.progress = [&](const MakeShardsProgress& progress) { bytes.push_back(progress.bytes); };
  const MakeShardsResult made = make_shards(folder / "out", options);
  EXPECT_EQ(made.documents, 1U);
  EXPECT_EQ(made.tokens, text.size() + 1);
  ASSERT_EQ(bytes.size(), 2U);  // progress is also reported inside the file
  EXPECT_LT(bytes[0], bytes[1]);
  EXPECT_EQ(bytes[1], text.size());
  const auto dataset = TokenDataset::open(folder / "out", DataSplit::All, 0);
  std::vector<std::int64_t> tokens(dataset->tokens()), documents(dataset->tokens());
  dataset->read(0, tokens, documents);
  EXPECT_TRUE(byte_tokenizer::decode(tokens) == text);
  EXPECT_EQ(documents.front(), documents.back());

  // A zero byte far into a file is an error, or the whole file is skipped.
  text[text.size() - 5] = '\0';
  folder.write("bad/large.txt", text);
  folder.write("bad/small.txt", "small");
  options.sources.paths = {folder / "bad"};
  EXPECT_TRUE(has_text(message_of<ConfigError>([&] { make_shards(folder / "none", options); }),
                       "zero byte at " + std::to_string(text.size() - 5)));
  EXPECT_FALSE(fs::exists(folder / "none"));
  options.sources.skip_bad_files = true;
  const MakeShardsResult rest = make_shards(folder / "rest", options);
  EXPECT_EQ(rest.documents, 1U);
  EXPECT_EQ(rest.tokens, 6U);
}

TEST(MakeShards, NothingIsStartedWithoutDiskSpace) {
  const ScratchFolder folder;
  check_space_for_shards(folder / "not/there/yet", 1000, 1);
  const std::string message = message_of<ConfigError>(
      [&] { check_space_for_shards(folder / "not/there/yet", std::uint64_t{1} << 60, 1); });
  EXPECT_TRUE(has_text(message, "there/yet: free space for token shards"));
  EXPECT_TRUE(has_text(message, "data.cap_bytes"));
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(MakeShards, ABinaryFileLeavesNoFolderBehind) {
  const ScratchFolder folder;
  folder.write("src/a.h", "int a;");
  folder.write("src/b.h", std::string("x\0y", 3));
  MakeShardsOptions options;
  options.sources.paths = {folder / "src"};
  const std::string message = message_of<ConfigError>([&] { make_shards(folder / "out", options); });
  EXPECT_TRUE(has_text(message, "b.h"));
  EXPECT_TRUE(has_text(message, "zero byte at 1"));
  EXPECT_FALSE(fs::exists(folder / "out"));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 1);
  options.sources.skip_bad_files = true;
  const MakeShardsResult made = make_shards(folder / "out", options);
  EXPECT_EQ(made.documents, 1U);
  ASSERT_EQ(made.bad.size(), 1U);
  EXPECT_TRUE(has_text(made.bad[0].path.string(), "b.h"));
}

TEST(MakeShards, TheSplitIsByFileAndDoesNotDependOnOthers) {
  const ScratchFolder folder;
  for (int i = 0; i < 200; ++i) folder.write("src/f" + std::to_string(i) + ".h", std::to_string(i));
  MakeShardsOptions options;
  options.sources.paths = {folder / "src"};
  make_shards(folder / "all", options);
  const auto all = TokenDataset::open(folder / "all", DataSplit::All, 0.2);
  const auto training = TokenDataset::open(folder / "all", DataSplit::Training, 0.2);
  const auto validation = TokenDataset::open(folder / "all", DataSplit::Validation, 0.2);
  EXPECT_EQ(training->documents() + validation->documents(), 200U);
  EXPECT_EQ(training->tokens() + validation->tokens(), all->tokens());
  EXPECT_GT(validation->documents(), 20U);
  EXPECT_LT(validation->documents(), 60U);
  const auto texts = [](const TokenDataset& dataset) {
    std::vector<std::int64_t> tokens(dataset.tokens());
    std::vector<std::int64_t> documents(dataset.tokens());
    dataset.read(0, tokens, documents);
    std::set<std::string> result;
    for (std::uint64_t d = 0; d < dataset.documents(); ++d) {
      std::vector<std::int64_t> part;
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        if (documents[i] == static_cast<std::int64_t>(d)) part.push_back(tokens[i]);
      }
      result.insert(byte_tokenizer::decode(part));
    }
    return result;
  };
  const auto before = texts(*validation);
  for (int i = 0; i < 200; i += 2) fs::remove(folder / ("src/f" + std::to_string(i) + ".h"));
  make_shards(folder / "half", options);
  for (const std::string& text : texts(*TokenDataset::open(folder / "half", DataSplit::Validation, 0.2)))
    EXPECT_TRUE(before.contains(text));
  for (const std::string& text : texts(*TokenDataset::open(folder / "half", DataSplit::Training, 0.2)))
    EXPECT_FALSE(before.contains(text));
}

#ifdef PENSTOCK_HAVE_RAPIDCHECK
RC_GTEST_PROP(TokenShardProperty, RoundTrip, ()) {
  const ScratchFolder folder;
  const auto vocabulary = *rc::gen::element<std::uint64_t>(2, 256, 257, 65537);
  const auto eod = *rc::gen::inRange<std::uint32_t>(
      0, static_cast<std::uint32_t>(std::min<std::uint64_t>(vocabulary, 1000)));
  const auto token =
      rc::gen::suchThat(rc::gen::inRange<std::uint32_t>(0, static_cast<std::uint32_t>(vocabulary)),
                        [eod](std::uint32_t t) { return t != eod; });
  const auto documents = *rc::gen::nonEmpty(
      rc::gen::container<Documents>(rc::gen::container<std::vector<std::uint32_t>>(token)));
  const auto block = *rc::gen::element<std::uint64_t>(64, 128, 4096);
  const auto shard =
      TokenShard::open(write_shard(folder / "a.tokens", documents,
                                   {.vocabulary = vocabulary, .end_of_document = eod, .block_bytes = block}));
  std::vector<std::int64_t> expected;
  for (std::size_t d = 0; d < documents.size(); ++d) {
    RC_ASSERT(shard->document(d).begin == expected.size());
    expected.insert(expected.end(), documents[d].begin(), documents[d].end());
    expected.push_back(eod);
    RC_ASSERT(shard->document(d).end == expected.size());
    RC_ASSERT(shard->document_of(expected.size() - 1) == d);
  }
  RC_ASSERT(all_tokens(*shard) == expected);
  const auto begin = *rc::gen::inRange<std::size_t>(0, expected.size());
  const auto size = *rc::gen::inRange<std::size_t>(0, expected.size() - begin + 1);
  std::vector<std::int64_t> part(size);
  shard->read(begin, part);
  RC_ASSERT(std::equal(part.begin(), part.end(), expected.begin() + static_cast<std::ptrdiff_t>(begin)));
}
#endif

}  // namespace data_test
}  // namespace penstock::train
