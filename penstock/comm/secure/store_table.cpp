#include "penstock/comm/secure/store_table.h"

#include <fmt/format.h>

#include <span>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/number.h"
#include "penstock/base/quote.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

constexpr MessageKind kRequestKind("STRQ"), kReplyKind("STRE");
constexpr std::uint16_t kStoreVersion = 1;

std::string text_of(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::span<const std::uint8_t> span_of(std::string_view bytes) {
  return {reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()};
}

bool known_operation(std::uint8_t operation) {
  return operation >= static_cast<std::uint8_t>(StoreOperation::Set) &&
         operation <= static_cast<std::uint8_t>(StoreOperation::Count);
}

// What is wrong with a request; empty if nothing is.
std::string store_objection(const StoreRequest& request) {
  const bool any_keys = request.operation == StoreOperation::Check;
  const std::size_t expected = request.operation == StoreOperation::Count ? 0 : 1;
  if (!any_keys && request.keys.size() != expected)
    return describe("store: keys of a request", fmt::format("{}", request.keys.size()),
                    fmt::format("{}", expected));
  for (const std::string& key : request.keys)
    if (key.size() > kMaxStoreKey)
      return describe(fmt::format("store: key {}", quote(key)), fmt::format("{} bytes", key.size()),
                      fmt::format("at most {} bytes", kMaxStoreKey), "use a shorter key");
  if (request.value.size() > kMaxStoreValue)
    return describe(fmt::format("store: value of {}", request.keys.empty() ? std::string("a request")
                                                                           : quote(request.keys.front())),
                    fmt::format("{} bytes", request.value.size()),
                    fmt::format("at most {} bytes", kMaxStoreValue),
                    "exchange large data as tensors, not through the store");
  return {};
}

}  // namespace

std::string StoreRequest::to_bytes() const {
  MessageWriter writer(kRequestKind, kStoreVersion, kMaxStoreMessage);
  writer.write(number).write(static_cast<std::uint8_t>(operation)).write(keys);
  writer.write(value).write(expected).write(amount);
  return text_of(writer.finish());
}

StoreRequest StoreRequest::from_bytes(std::string_view bytes) {
  MessageReader reader(span_of(bytes), kRequestKind, {kStoreVersion, kStoreVersion}, kMaxStoreMessage);
  StoreRequest request;
  reader.read(request.number);
  const std::size_t at = reader.offset();
  const auto operation = reader.read<std::uint8_t>();
  if (!known_operation(operation))
    reader.refuse(at, "operation", fmt::format("{}", operation), "an operation of the store");
  request.operation = static_cast<StoreOperation>(operation);
  reader.read(request.keys).read(request.value).read(request.expected).read(request.amount);
  reader.expect_end();
  return request;
}

std::string StoreReply::to_bytes() const {
  MessageWriter writer(kReplyKind, kStoreVersion, kMaxStoreMessage);
  writer.write(number).write(found).write(value).write(amount).write(refused);
  return text_of(writer.finish());
}

StoreReply StoreReply::from_bytes(std::string_view bytes) {
  MessageReader reader(span_of(bytes), kReplyKind, {kStoreVersion, kStoreVersion}, kMaxStoreMessage);
  StoreReply reply;
  reader.read(reply.number).read(reply.found).read(reply.value).read(reply.amount).read(reply.refused);
  reader.expect_end();
  return reply;
}

void StoreTable::put(const std::string& key, std::string value) {
  const auto found = values_.find(key);
  const std::size_t before = found == values_.end() ? 0 : key.size() + found->second.size();
  bytes_ = bytes_ - before + key.size() + value.size();
  values_.insert_or_assign(key, std::move(value));
}

StoreReply StoreTable::apply(const StoreRequest& request) {
  StoreReply reply;
  reply.number = request.number;
  reply.refused = store_objection(request);
  if (!reply.refused.empty()) return reply;
  const std::lock_guard lock(mutex_);
  const bool writes = request.operation == StoreOperation::Set || request.operation == StoreOperation::Add ||
                      request.operation == StoreOperation::CompareSet;
  constexpr std::size_t kCounterBytes = 20;
  if (writes &&
      bytes_ + request.keys.front().size() + request.value.size() + kCounterBytes > kMaxStoreBytes) {
    reply.refused =
        describe("store: all keys and values together", fmt::format("{} bytes and more", bytes_),
                 fmt::format("at most {} bytes", kMaxStoreBytes), "delete keys that nobody reads any more");
    return reply;
  }
  switch (request.operation) {
    case StoreOperation::Set:
      put(request.keys.front(), request.value);
      break;
    case StoreOperation::Get:
      if (const auto found = values_.find(request.keys.front()); found != values_.end()) {
        reply.found = true;
        reply.value = found->second;
      }
      break;
    case StoreOperation::Add: {
      const std::string& key = request.keys.front();
      std::int64_t sum = request.amount;
      if (const auto found = values_.find(key); found != values_.end()) {
        const auto present = parse_integer(found->second);
        if (!present || __builtin_add_overflow(*present, request.amount, &sum)) {
          reply.refused = describe(fmt::format("store: counter {}", quote(key)), quote(found->second),
                                   "a decimal number that does not overflow");
          break;
        }
      }
      put(key, fmt::format("{}", sum));
      reply.amount = sum;
      break;
    }
    case StoreOperation::CompareSet: {
      const auto found = values_.find(request.keys.front());
      const bool absent = found == values_.end();
      if (absent ? request.expected.empty() : found->second == request.expected) {
        put(request.keys.front(), request.value);
        reply.value = request.value;
      } else {
        reply.value = absent ? request.expected : found->second;
      }
      break;
    }
    case StoreOperation::Delete:
      if (const auto found = values_.find(request.keys.front()); found != values_.end()) {
        reply.found = true;
        bytes_ -= found->first.size() + found->second.size();
        values_.erase(found);
      }
      break;
    case StoreOperation::Check:
      reply.found = true;
      for (const std::string& key : request.keys) reply.found = reply.found && values_.contains(key);
      break;
    case StoreOperation::Count:
      reply.amount = static_cast<std::int64_t>(values_.size());
      break;
  }
  return reply;
}

}  // namespace penstock::comm
