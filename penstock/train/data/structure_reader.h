// Finds the structure of any part of a document, without keeping the structure of all of it.
//
//   StructureReader reader;
//   for (const DocumentPart& part : dataset.parts(begin, count)) reader.read(part, found);
//
// The structure of a token depends on the whole document before it. The reader keeps states of the lexer on
// the way through long documents, so that a part costs a fixed number of tokens more than its own, except
// where a document is read for the first time. What it keeps is bounded; documents that have not been read
// for the longest time go first.
//
// Documents are byte tokens of C++ text. Thread safety: any thread, one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "penstock/train/data/cpp_structure.h"
#include "penstock/train/data/token_dataset.h"
#include "penstock/train/data/token_structure.h"

namespace penstock::train {

struct StructureReaderOptions {
  std::uint64_t interval = 16384;                 // tokens between kept states
  std::uint64_t states_per_document = 1024;       // more tokens between them in longer documents
  std::size_t max_bytes = std::size_t{64} << 20;  // of all kept states
};

class StructureReader {
 public:
  explicit StructureReader(StructureReaderOptions options = {});

  // `found` has one element for each token of the part. Throws what the source throws.
  void read(const DocumentPart& part, std::span<TokenStructure> found);

  // Bytes of the states that are kept.
  std::size_t kept_bytes() const;

 private:
  using Key = std::pair<const TokenSource*, std::uint64_t>;
  struct Document {
    Key key;
    std::uint64_t interval = 0;
    std::vector<CppStructure> states;  // after interval, 2 * interval, ... tokens
    std::size_t bytes = 0;
  };

  // The state of the lexer before the first token of the part.
  CppStructure state_before(const DocumentPart& part);
  Document& document_of(const DocumentPart& part);
  void keep(Document& document, const CppStructure& state);
  void make_room(const Document& current);

  const StructureReaderOptions options_;
  mutable std::mutex mutex_;
  // Guarded by the mutex.
  std::list<Document> documents_;  // the most recently read first
  std::map<Key, std::list<Document>::iterator> places_;
  std::size_t bytes_ = 0;
  std::vector<std::int64_t> tokens_;
};

}  // namespace penstock::train
