#include "penstock/comm/group/agreement.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

// FNV-1a. Ranks compare the result, so it must not depend on the process, as std::hash may.
std::int64_t fingerprint(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return static_cast<std::int64_t>(hash);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

// Returns the texts of all ranks, in group order.
std::vector<std::string> exchange(const Group& group, const std::string& text,
                                  const std::vector<std::int64_t>& sizes) {
  std::vector<at::Tensor> parts;
  for (const std::int64_t size : sizes) parts.push_back(at::empty({size}, at::kByte));
  const at::Tensor own = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  if (!text.empty()) std::memcpy(own.data_ptr(), text.data(), text.size());
  group.all_gather_uneven(parts, own, {.label = "differences between ranks", .timeout = {}}).wait();
  std::vector<std::string> texts;
  for (const at::Tensor& part : parts)
    texts.emplace_back(static_cast<const char*>(part.data_ptr()), static_cast<std::size_t>(part.numel()));
  return texts;
}

}  // namespace

void require_agreement(const Group& group, std::string_view what, const std::vector<std::string>& lines,
                       std::string_view remedy) {
  if (group.size() == 1) return;
  std::string text;
  for (std::string line : lines) {
    std::replace(line.begin(), line.end(), '\n', ' ');
    text += line + "\n";
  }
  at::Tensor own = at::empty({2}, at::kLong);
  own.data_ptr<std::int64_t>()[0] = fingerprint(text);
  own.data_ptr<std::int64_t>()[1] = static_cast<std::int64_t>(text.size());
  const at::Tensor all = at::empty({2 * group.size()}, at::kLong);
  group.all_gather(all, own, {.label = fmt::format("compare between ranks: {}", what), .timeout = {}}).wait();
  const auto* numbers = all.data_ptr<std::int64_t>();
  std::vector<std::int64_t> sizes;
  int other = 0;  // the first rank that differs from rank 0
  for (int rank = 0; rank < group.size(); ++rank) {
    sizes.push_back(numbers[2 * rank + 1]);
    if (other == 0 && (numbers[2 * rank] != numbers[0] || numbers[2 * rank + 1] != numbers[1])) other = rank;
  }
  if (other == 0) return;
  const std::vector<std::string> texts = exchange(group, text, sizes);
  const std::vector<std::string> expected = lines_of(texts[0]),
                                 actual = lines_of(texts[static_cast<std::size_t>(other)]);
  const auto first = static_cast<std::size_t>(
      std::mismatch(expected.begin(), expected.end(), actual.begin(), actual.end()).first - expected.begin());
  const auto line = [&](const std::vector<std::string>& of) {
    return first < of.size() ? of[first] : fmt::format("no entry (there are only {})", of.size());
  };
  throw ValueError(describe(fmt::format("{}: entry {} on rank {}", what, first, group.rank_at(other)),
                            line(actual), fmt::format("{}, as on rank {}", line(expected), group.rank_at(0)),
                            remedy));
}

}  // namespace penstock::comm
