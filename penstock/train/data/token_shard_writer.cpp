#include "penstock/train/data/token_shard_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "penstock/base/checksum.h"
#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::train {

TokenShardWriter::TokenShardWriter(std::filesystem::path path, const TokenShardOptions& options)
    : path_(std::move(path)), temporary_(fmt::format("{}.tmp-{}", path_.string(), ::getpid())) {
  header_.vocabulary = options.vocabulary;
  header_.end_of_document = options.end_of_document;
  header_.token_bytes =
      options.token_bytes == 0 ? least_token_bytes(options.vocabulary) : options.token_bytes;
  header_.block_bytes = options.block_bytes;
  TokenShardHeader with_counts = header_;
  with_counts.tokens = with_counts.documents = 1;
  check_shard_header(with_counts);
  block_.reserve(header_.block_bytes);
  file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file_ < 0) fail("cannot be created");
}

TokenShardWriter::~TokenShardWriter() {
  if (file_ >= 0) ::close(file_);
  std::error_code ignored;  // a leftover has a name that is never read
  if (!finished_) std::filesystem::remove(temporary_, ignored);
}

void TokenShardWriter::fail(const char* what) const {
  throw ConfigError(describe(fmt::format("{}: {}", temporary_.string(), what), std::strerror(errno),
                             "a writable folder with free space", "give another folder or free some space"));
}

void TokenShardWriter::write_all(const void* data, std::size_t size, std::uint64_t offset) {
  const auto* from = static_cast<const std::uint8_t*>(data);
  while (size > 0) {
    const ::ssize_t count = ::pwrite(file_, from, size, static_cast<::off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail("cannot be written");
    from += count;
    size -= static_cast<std::size_t>(count);
    offset += static_cast<std::uint64_t>(count);
  }
}

void TokenShardWriter::flush_block() {
  if (block_.empty()) return;
  checksums_.push_back(checksum64(block_));
  write_all(block_.data(), block_.size(), written_);
  written_ += block_.size();
  block_.clear();
}

void TokenShardWriter::append(const void* data, std::size_t size) {
  const auto* from = static_cast<const std::uint8_t*>(data);
  while (size > 0) {
    const std::size_t count = std::min<std::size_t>(size, header_.block_bytes - block_.size());
    block_.insert(block_.end(), from, from + count);
    if (block_.size() == header_.block_bytes) flush_block();
    from += count;
    size -= count;
  }
}

void TokenShardWriter::add_document(std::span<const std::uint32_t> tokens, std::uint64_t key) {
  add_tokens(tokens);
  end_document(key);
}

void TokenShardWriter::add_tokens(std::span<const std::uint32_t> tokens) {
  if (finished_)
    throw StateError(describe("token shard", "a document after finish", "", "create another writer"));
  if (header_.tokens + tokens.size() + 1 > kMostShardTokens)
    throw ValueError(describe("tokens per shard", "more than 2^48", "", "start another shard"));
  // Everything is checked before anything is written.
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= header_.vocabulary || tokens[i] == header_.end_of_document)
      throw ValueError(
          describe(fmt::format("token {} of document {}", i, header_.documents), fmt::format("{}", tokens[i]),
                   fmt::format("a token below the vocabulary of {} other than the end-of-document token ({})",
                               header_.vocabulary, header_.end_of_document),
                   "pass one document at a time, in tokens of this vocabulary"));
  }
  inside_ = true;
  put(tokens);
}

void TokenShardWriter::end_document(std::uint64_t key) {
  if (!inside_)
    throw StateError(
        describe("token shard", "the end of a document that was not started", "", "call add_tokens first"));
  put({&header_.end_of_document, 1});
  inside_ = false;
  ++header_.documents;
  documents_.push_back(header_.tokens);
  documents_.push_back(key);
}

void TokenShardWriter::put(std::span<const std::uint32_t> tokens) {
  encoded_.resize(tokens.size() * header_.token_bytes);
  for (std::size_t i = 0; i < tokens.size(); ++i)  // little-endian: the low bytes come first
    std::memcpy(encoded_.data() + i * header_.token_bytes, &tokens[i], header_.token_bytes);
  append(encoded_.data(), encoded_.size());
  header_.tokens += tokens.size();
}

TokenShardHeader TokenShardWriter::finish() {
  if (finished_) throw StateError(describe("token shard", "a second call of finish", "one call"));
  if (inside_)
    throw StateError(describe("token shard", "finish inside a document", "", "call end_document first"));
  if (header_.documents == 0)
    throw StateError(
        describe("token shard", "no document", "at least one document", "add documents before finish"));
  const std::array<std::uint8_t, 8> zeros{};
  append(zeros.data(), header_.documents_offset() - kShardHeaderBytes - header_.tokens * header_.token_bytes);
  append(documents_.data(), documents_.size() * sizeof(std::uint64_t));
  flush_block();
  const std::span table(reinterpret_cast<const std::uint8_t*>(checksums_.data()), checksums_.size() * 8);
  header_.table_checksum = checksum64(table);
  write_all(table.data(), table.size(), written_);
  std::array<std::uint8_t, kShardHeaderBytes> bytes{};
  encode_shard_header(header_, bytes);
  write_all(bytes.data(), bytes.size(), 0);
  if (::fsync(file_) != 0) fail("cannot be synced");
  const int closed = ::close(std::exchange(file_, -1));
  if (closed != 0) fail("cannot be closed");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot be renamed");
  finished_ = true;
  // The name is durable only after its folder is synced.
  const std::filesystem::path folder =
      path_.has_parent_path() ? path_.parent_path() : std::filesystem::path(".");
  const int directory = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) fail("its folder cannot be opened");
  const int synced = ::fsync(directory);
  ::close(directory);
  if (synced != 0) fail("its folder cannot be synced");
  return header_;
}

}  // namespace penstock::train
