#include "penstock/train/data/structure_reader.h"

#include <fmt/format.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::train {

StructureReader::StructureReader(StructureReaderOptions options) : options_(options) {
  if (options_.interval < 1 || options_.states_per_document < 1)
    throw ValueError(
        describe("structure reader",
                 fmt::format("{} states, every {} tokens", options_.states_per_document, options_.interval),
                 "at least 1 of each"));
}

std::size_t StructureReader::kept_bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

StructureReader::Document& StructureReader::document_of(const DocumentPart& part) {
  const Key key{part.source, part.document};
  if (const auto known = places_.find(key); known != places_.end()) {
    documents_.splice(documents_.begin(), documents_, known->second);
    return documents_.front();
  }
  constexpr std::size_t kEntryBytes = sizeof(Document) + 128;  // with the nodes of list and map
  documents_.push_front({.key = key, .interval = options_.interval, .states = {}, .bytes = kEntryBytes});
  places_[key] = documents_.begin();
  bytes_ += kEntryBytes;
  return documents_.front();
}

void StructureReader::make_room(const Document& current) {
  while (bytes_ > options_.max_bytes && &documents_.back() != &current) {
    bytes_ -= documents_.back().bytes;
    places_.erase(documents_.back().key);
    documents_.pop_back();
  }
}

void StructureReader::keep(Document& document, const CppStructure& state) {
  const auto add = [&](std::size_t bytes) {
    document.bytes += bytes;
    bytes_ += bytes;
  };
  document.states.push_back(state);
  add(state.bytes());
  if (document.states.size() <= options_.states_per_document) return;
  // A long document: every second state is enough.
  std::vector<CppStructure> rest;
  for (std::size_t i = 0; i < document.states.size(); ++i) {
    if (i % 2 == 1)
      rest.push_back(std::move(document.states[i]));
    else
      add(0 - document.states[i].bytes());
  }
  document.states = std::move(rest);
  document.interval *= 2;
}

CppStructure StructureReader::state_before(const DocumentPart& part) {
  const std::uint64_t wanted = part.begin - part.document;
  Document* document = wanted < options_.interval ? nullptr : &document_of(part);
  std::uint64_t at = 0;
  CppStructure state;
  if (document != nullptr) {
    const std::uint64_t kept = std::min<std::uint64_t>(wanted / document->interval, document->states.size());
    if (kept > 0) state = document->states[kept - 1];
    at = kept * document->interval;
  }
  while (at < wanted) {
    const std::uint64_t interval = document != nullptr ? document->interval : options_.interval;
    const std::uint64_t stop = std::min(wanted, (at / interval + 1) * interval);
    tokens_.resize(stop - at);
    part.source->read(part.document + at, tokens_);
    state.read(tokens_, {});
    at = stop;
    if (document != nullptr && at == (document->states.size() + 1) * interval) keep(*document, state);
  }
  if (document != nullptr) make_room(*document);
  return state;
}

void StructureReader::read(const DocumentPart& part, std::span<TokenStructure> found) {
  if (found.size() != part.tokens)
    throw ValueError(describe("buffer for structure", fmt::format("{}", found.size()),
                              fmt::format("the tokens of the part, {}", part.tokens)));
  const std::lock_guard lock(mutex_);
  CppStructure state = state_before(part);
  tokens_.resize(found.size());
  part.source->read(part.begin, tokens_);
  state.read(tokens_, found);
}

}  // namespace penstock::train
