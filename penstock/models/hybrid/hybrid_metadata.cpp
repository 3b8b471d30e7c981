#include "penstock/hybrid_metadata.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/models/blocks/input_check.h"

namespace penstock::models {
namespace {

// What a tensor must be.
enum class Expected {
  IntegersPerToken,
  IdsPerToken,
  LongPerToken,
  IdsPerRowOrToken,
  IntegersPerRow,
  PairsOfTokens
};

struct TensorMember {
  const char* name;  // of the keyword
  at::Tensor HybridMetadata::*value;
  Expected expected;
};
constexpr std::array<TensorMember, 14> kTensors = {{
    {"documents", &HybridMetadata::documents, Expected::IntegersPerToken},
    {"structure_kinds", &HybridMetadata::structure_kinds, Expected::IdsPerToken},
    {"dependency_levels", &HybridMetadata::dependency_levels, Expected::IdsPerToken},
    {"syntax_depths", &HybridMetadata::syntax_depths, Expected::IdsPerToken},
    {"sibling_indices", &HybridMetadata::sibling_indices, Expected::IdsPerToken},
    {"node_types", &HybridMetadata::node_types, Expected::IdsPerToken},
    {"parents", &HybridMetadata::parents, Expected::IdsPerToken},
    {"platforms", &HybridMetadata::platforms, Expected::IdsPerRowOrToken},
    {"relations", &HybridMetadata::relations, Expected::PairsOfTokens},
    {"tokens", &HybridMetadata::tokens, Expected::IdsPerToken},
    {"targets", &HybridMetadata::targets, Expected::LongPerToken},
    {"row_valid_tokens", &HybridMetadata::row_valid_tokens, Expected::IntegersPerRow},
    {"row_valid_blocks", &HybridMetadata::row_valid_blocks, Expected::IntegersPerRow},
    {"row_valid_slots", &HybridMetadata::row_valid_slots, Expected::IntegersPerRow},
}};

struct NumberMember {
  const char* name;
  std::int64_t HybridMetadata::*value;
  const char* counts;  // what it is the unit of
  at::Tensor HybridMetadata::*counted;
};
constexpr std::array<NumberMember, 2> kNumbers = {{
    {"base_block_tokens", &HybridMetadata::base_block_tokens, "row_valid_blocks",
     &HybridMetadata::row_valid_blocks},
    {"row_block_tokens", &HybridMetadata::row_block_tokens, "row_valid_slots",
     &HybridMetadata::row_valid_slots},
}};

std::vector<std::string> known_keywords() {
  std::vector<std::string> names;
  for (const TensorMember& member : kTensors) names.emplace_back(member.name);
  for (const NumberMember& member : kNumbers) names.emplace_back(member.name);
  return names;
}

std::string keyword_text(const std::string& name) { return fmt::format("metadata: {}", name); }

void read_keyword(HybridMetadata& metadata, const std::string& name, const Tree& value) {
  for (const TensorMember& member : kTensors) {
    if (name != member.name) continue;
    if (!value.is_none() && !value.is_tensor())
      throw ValueError(describe(keyword_text(name), value.to_string(), "a tensor"));
    metadata.*member.value = value.is_none() ? at::Tensor() : value.tensor();
    return;
  }
  for (const NumberMember& member : kNumbers) {
    if (name != member.name) continue;
    if (!value.is_none() && value.kind() != Tree::Kind::Int)
      throw ValueError(describe(keyword_text(name), value.to_string(), "a whole number"));
    metadata.*member.value = value.is_none() ? 0 : value.integer();
    return;
  }
  const std::vector<std::string> known = known_keywords();
  const std::string nearest = nearest_name(name, known);
  throw ValueError(describe("HybridStage: keyword argument", quote(name),
                            fmt::format("one of {}", fmt::join(known, ", ")),
                            nearest.empty() ? "" : fmt::format("did you mean {}?", nearest)));
}

bool is_integral(const at::Tensor& tensor) { return at::isIntegralType(tensor.scalar_type(), false); }
bool has_ids(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt;
}

void check_member(const TensorMember& member, const at::Tensor& tensor, std::int64_t batch,
                  std::int64_t length) {
  const std::vector<std::int64_t> row{batch}, token{batch, length};
  bool good = false;
  std::string expected;
  switch (member.expected) {
    case Expected::IntegersPerToken:
      good = is_integral(tensor) && tensor.sizes() == token;
      expected = fmt::format("integers [{}, {}], one for each token", batch, length);
      break;
    case Expected::IdsPerToken:
      good = has_ids(tensor) && tensor.sizes() == token;
      expected = fmt::format("Long or Int [{}, {}], one for each token", batch, length);
      break;
    case Expected::LongPerToken:
      good = tensor.scalar_type() == at::kLong && tensor.sizes() == token;
      expected = fmt::format("Long [{}, {}], one for each token", batch, length);
      break;
    case Expected::IdsPerRowOrToken:
      good = has_ids(tensor) && (tensor.sizes() == row || tensor.sizes() == token);
      expected =
          fmt::format("Long or Int [{}] or [{}, {}], one for each row or each token", batch, batch, length);
      break;
    case Expected::IntegersPerRow:
      good = is_integral(tensor) && tensor.sizes() == row;
      expected = fmt::format("integers [{}], one for each row", batch);
      break;
    case Expected::PairsOfTokens:
      good = tensor.dim() == 4 && tensor.size(0) == batch && tensor.size(2) == length &&
             tensor.size(3) == length && !tensor.is_complex();
      expected = fmt::format("Bool or numbers [{}, relations, {}, {}]", batch, length, length);
      break;
  }
  if (!good) throw ValueError(describe(keyword_text(member.name), shown(tensor), expected));
}

}  // namespace

Tree HybridMetadata::keywords() const {
  std::vector<Tree::Item> items;
  for (const TensorMember& member : kTensors)
    if ((this->*member.value).defined()) items.emplace_back(member.name, this->*member.value);
  for (const NumberMember& member : kNumbers)
    if (this->*member.value != 0) items.emplace_back(member.name, this->*member.value);
  return items.empty() ? Tree() : Tree::dict(std::move(items));
}

HybridMetadata HybridMetadata::from_keywords(const Tree& keywords) {
  HybridMetadata metadata;
  if (keywords.is_none()) return metadata;
  if (keywords.kind() != Tree::Kind::Dict)
    throw ValueError(describe("HybridStage: keyword arguments", keywords.to_string(), "a dict, or None"));
  for (const std::string& name : keywords.keys()) read_keyword(metadata, name, keywords[name]);
  return metadata;
}

void HybridMetadata::check(std::int64_t batch, std::int64_t length) const {
  for (const TensorMember& member : kTensors)
    if ((this->*member.value).defined()) check_member(member, this->*member.value, batch, length);
  for (const NumberMember& member : kNumbers)
    if (this->*member.value < 0 || (this->*member.value == 0 && (this->*member.counted).defined()))
      throw ValueError(describe(keyword_text(member.name), fmt::format("{}", this->*member.value),
                                "at least 1 token", fmt::format("it is the unit of {}", member.counts)));
}

}  // namespace penstock::models
