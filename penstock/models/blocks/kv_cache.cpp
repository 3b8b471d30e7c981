#include "penstock/models/blocks/kv_cache.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::models {
namespace {

// Tokens that are appended before those of a small window are moved.
constexpr std::int64_t kLeastSlack = 64;

void write_tokens(const at::Tensor& memory, std::int64_t at, const at::Tensor& tokens) {
  memory.narrow(2, at, tokens.size(2)).copy_(tokens);
}

at::Tensor last_tokens(const at::Tensor& x, std::int64_t used, std::int64_t count) {
  return x.narrow(2, used - count, count);
}

}  // namespace

KvCache::KvCache(std::int64_t context, std::int64_t capacity) : capacity_(capacity) {
  if (capacity < 1 || capacity > context)
    throw ValueError(describe("KvCache: capacity", fmt::format("{}", capacity),
                              fmt::format("1 to the model's context, {}", context)));
}

void KvCache::make_room(Stored& stored, const at::Tensor& keys, std::int64_t room) const {
  at::Tensor& memory = stored.keys;
  if (!memory.defined() ||
      (length_ == 0 && (memory.size(0) != keys.size(0) || memory.size(2) != room ||
                        memory.scalar_type() != keys.scalar_type() || memory.device() != keys.device()))) {
    memory = at::empty({keys.size(0), keys.size(1), room, keys.size(3)}, keys.options());
    stored.values = at::empty_like(memory);
  }
  if (memory.size(0) != keys.size(0))
    throw ValueError(describe("KvCache: batch", fmt::format("{}", keys.size(0)),
                              fmt::format("{}, as before", memory.size(0)), "clear() the cache first"));
}

std::pair<at::Tensor, at::Tensor> KvCache::put(std::int64_t block, const at::Tensor& keys,
                                               const at::Tensor& values, std::int64_t window) {
  const std::int64_t added = keys.size(2);
  if (length_ + added > capacity_)
    throw ValueError(describe("KvCache", fmt::format("{} tokens and {} new ones", length_, added),
                              fmt::format("at most {}", capacity_), "create it with a larger capacity"));
  Stored& stored = blocks_[block];
  if (window > 0 && window < capacity_) return put_in_window(stored, keys, values, window);
  make_room(stored, keys, capacity_);
  write_tokens(stored.keys, length_, keys);
  write_tokens(stored.values, length_, values);
  return {stored.keys.narrow(2, 0, length_ + added), stored.values.narrow(2, 0, length_ + added)};
}

std::pair<at::Tensor, at::Tensor> KvCache::put_in_window(Stored& stored, const at::Tensor& keys,
                                                         const at::Tensor& values,
                                                         std::int64_t window) const {
  const std::int64_t before = window - 1, added = keys.size(2),  // `before`: older tokens that are seen
      room = std::min(capacity_, before + std::max(before, kLeastSlack));
  make_room(stored, keys, room);
  if (length_ == 0) stored.used = stored.position = 0;
  if (stored.position != length_)
    throw StateError(describe("KvCache", fmt::format("a block with {} tokens", stored.position),
                              fmt::format("{}, as the other blocks", length_),
                              "a forward before did not complete: clear() the cache and begin again"));
  stored.position += added;
  const std::int64_t older = std::min(stored.used, before);
  if (older + added > room) {
    // More than the memory holds: a prompt. Its last tokens remain.
    const std::pair<at::Tensor, at::Tensor> joined{
        at::cat({last_tokens(stored.keys, stored.used, older), keys}, 2),
        at::cat({last_tokens(stored.values, stored.used, older), values}, 2)};
    stored.used = std::min(before, older + added);
    write_tokens(stored.keys, 0, last_tokens(joined.first, older + added, stored.used));
    write_tokens(stored.values, 0, last_tokens(joined.second, older + added, stored.used));
    return joined;
  }
  if (stored.used + added > room) {
    for (const at::Tensor& memory : {stored.keys, stored.values})
      write_tokens(memory, 0, last_tokens(memory, stored.used, older).clone());
    stored.used = older;
  }
  write_tokens(stored.keys, stored.used, keys);
  write_tokens(stored.values, stored.used, values);
  stored.used += added;
  const std::int64_t seen = std::min(stored.used, before + added);
  return {last_tokens(stored.keys, stored.used, seen), last_tokens(stored.values, stored.used, seen)};
}

}  // namespace penstock::models
