#include "penstock/comm/group/contract.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "penstock/base/describe.h"
#include "penstock/base/text.h"
#include "penstock/comm/message/message.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

constexpr MessageKind kKind("P2PC");
constexpr std::uint16_t kVersion = 1;

// The finalizer of splitmix64: every input bit affects every output bit.
std::uint64_t mix(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

}  // namespace

Contract Contract::of(const at::Tensor& tensor, int tag, std::uint32_t number) {
  Contract contract;
  contract.tag = tag;
  contract.number = number;
  contract.bytes = tensor.nbytes();
  contract.dtype = static_cast<std::int8_t>(tensor.scalar_type());
  contract.dims = static_cast<std::uint8_t>(std::min<std::int64_t>(tensor.dim(), 255));
  for (int i = 0; i < std::min<int>(contract.dims, kMaxDims); ++i) contract.shape[i] = tensor.size(i);
  return contract;
}

std::uint64_t Contract::key() const {
  const std::uint64_t place = static_cast<std::uint64_t>(static_cast<std::uint32_t>(tag)) << 32 | number;
  return mix(mix(place + 0x9e3779b97f4a7c15ull) ^ (bytes << 8 | static_cast<std::uint8_t>(dtype))) &
         ((1ull << 56) - 1);
}

std::string Contract::describe() const {
  std::string text = dtype >= 0 && dtype < static_cast<int>(at::ScalarType::NumOptions)
                         ? c10::toString(static_cast<at::ScalarType>(dtype))
                         : fmt::format("unknown type {}", static_cast<int>(dtype));
  text += "[";
  for (int i = 0; i < std::min<int>(dims, kMaxDims); ++i)
    text += fmt::format("{}{}", i > 0 ? ", " : "", shape[i]);
  if (dims > kMaxDims) text += ", ...";
  return text + fmt::format("] ({})", format_bytes(bytes));
}

std::string Contract::to_bytes() const {
  MessageWriter writer(kKind, kVersion);
  writer.write(tag);
  writer.write(number);
  writer.write(bytes);
  writer.write(dtype);
  writer.write(dims);
  for (const auto size : shape) writer.write(size);
  const auto message = writer.finish();
  return std::string(message.begin(), message.end());
}

Contract Contract::from_bytes(const std::string& text) {
  const std::vector<std::uint8_t> message(text.begin(), text.end());
  MessageReader reader(message, kKind, {kVersion, kVersion});
  Contract contract;
  reader.read(contract.tag);
  reader.read(contract.number);
  reader.read(contract.bytes);
  reader.read(contract.dtype);
  reader.read(contract.dims);
  for (auto& size : contract.shape) reader.read(size);
  reader.expect_end();
  return contract;
}

}  // namespace penstock::comm
