#include "penstock/train/job/structure_metadata.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/hybrid_metadata.h"

namespace penstock::train {
namespace {

// The letters of the blocks of a rank, those of multi-token prediction included.
std::string letters_of(const ModelConfig& model, const std::vector<models::StagePart>& parts) {
  std::string all =
      model.pattern.empty() ? std::string(static_cast<std::size_t>(model.layers), 'A') : model.pattern;
  std::erase(all, '|');
  std::string letters;
  for (const models::StagePart& part : parts) {
    letters += all.substr(static_cast<std::size_t>(part.first_block),
                          static_cast<std::size_t>(part.end_block - part.first_block));
    if (part.has_head() && model.multi_token_depth > 0)
      letters += model.multi_token_block.empty() ? all.substr(all.size() - 1) : model.multi_token_block;
  }
  return letters;
}

at::Tensor to_device(const at::Tensor& host, at::Device device) {
  return device.is_cpu() ? host : host.pin_memory().to(device, /*non_blocking=*/true);
}

// [rows, length] of one number for each token.
template <class Number>
at::Tensor per_token(const StructureRows& rows, at::Device device, const Number& number) {
  at::Tensor values = at::empty({rows.rows, rows.length}, at::kInt);
  auto* out = values.data_ptr<std::int32_t>();
  for (std::size_t i = 0; i < rows.tokens.size(); ++i) out[i] = number(rows.tokens[i], i);
  return to_device(values, device);
}

std::int32_t ordinal(std::uint32_t value) {
  return static_cast<std::int32_t>(std::min<std::uint32_t>(value, 0x7fffffff));
}

// One row with what relations compare.
class RelatedTokens {
 public:
  RelatedTokens(std::span<const TokenStructure> tokens, std::span<const std::int64_t> documents)
      : tokens_(tokens), documents_(documents) {}

  std::int64_t length() const { return static_cast<std::int64_t>(tokens_.size()); }
  bool same_document(std::int64_t i, std::int64_t j) const { return document(i) == document(j); }
  // The place of the innermost bracket around a token, negative before the row; false: there is none.
  bool has_bracket(std::int64_t i) const { return token(i).parent_distance > 0; }
  std::int64_t bracket(std::int64_t i) const { return i - std::int64_t{token(i).parent_distance}; }
  bool same_bracket(std::int64_t i, std::int64_t j) const {
    if (!same_document(i, j) || has_bracket(i) != has_bracket(j)) return false;
    return !has_bracket(i) || bracket(i) == bracket(j);
  }
  bool same_element(std::int64_t i, std::int64_t j) const {
    return token(i).sibling == token(j).sibling && same_bracket(i, j);
  }
  bool same_name(std::int64_t i, std::int64_t j) const {
    return token(i).name != 0 && token(i).name == token(j).name && same_document(i, j);
  }

 private:
  const TokenStructure& token(std::int64_t i) const { return tokens_[static_cast<std::size_t>(i)]; }
  std::int64_t document(std::int64_t i) const { return documents_[static_cast<std::size_t>(i)]; }

  std::span<const TokenStructure> tokens_;
  std::span<const std::int64_t> documents_;
};

// Fills [length, length] of one relation, whose elements are false.
void relate(std::int64_t relation, const RelatedTokens& row, bool* out) {
  const std::int64_t length = row.length();
  for (std::int64_t i = 0; i < length; ++i, out += length) {
    if (relation == 2) {
      for (std::int64_t j = i; row.has_bracket(j) && row.bracket(j) >= 0;) {
        j = row.bracket(j);
        out[j] = true;
      }
      continue;
    }
    for (std::int64_t j = 0; j <= i; ++j)
      out[j] = relation == 0   ? row.same_element(i, j)
               : relation == 1 ? row.same_bracket(i, j)
                               : row.same_name(i, j);
  }
}

at::Tensor relations_of(std::int64_t relations, const StructureRows& rows, at::Device device) {
  at::Tensor related = at::zeros({rows.rows, relations, rows.length, rows.length}, at::kBool);
  const std::int64_t known = std::min(relations, kStructureRelations), pairs = rows.length * rows.length;
  const auto length = static_cast<std::size_t>(rows.length);
  for (std::int64_t row = 0; row < rows.rows; ++row) {
    const auto first = static_cast<std::size_t>(row) * length;
    const RelatedTokens tokens(rows.tokens.subspan(first, length), rows.documents.subspan(first, length));
    for (std::int64_t relation = 0; relation < known; ++relation)
      relate(relation, tokens, related.data_ptr<bool>() + (row * relations + relation) * pairs);
  }
  return to_device(related, device);
}

}  // namespace

bool trains_on_structure(const TrainConfig& config) {
  const ModelConfig& model = config.model;
  return config.data.structure == "cpp" &&
         (model.structure_embedding || model.tree_feed || model.relations > 0);
}

StructureNeeds structure_needs(const TrainConfig& config, const std::vector<models::StagePart>& parts) {
  if (!trains_on_structure(config)) return {};
  const ModelConfig& model = config.model;
  if (model.type != "auto" && model.type != "hybrid")
    return {.ids = model.structure_embedding, .parents = model.tree_feed, .relations = model.relations};
  const std::string letters = letters_of(model, parts);
  const auto has = [&](char letter) { return letters.find(letter) != std::string::npos; };
  const bool first =
      std::any_of(parts.begin(), parts.end(), [](const models::StagePart& part) { return part.has_embed(); });
  return {.ids = model.structure_embedding && first,
          .parents = model.tree_feed && (has('F') || (has('A') && model.attention_feed)),
          .relations = has('A') ? model.relations : 0};
}

Tree structure_metadata(const StructureNeeds& needs, const StructureRows& rows, at::Device device) {
  const auto count = static_cast<std::size_t>(rows.rows * rows.length);
  if (!needs.any()) return Tree();
  if (rows.tokens.size() != count || rows.documents.size() != count)
    throw ValueError(describe(
        "structure of a batch",
        fmt::format("{} tokens with structure, {} with documents", rows.tokens.size(), rows.documents.size()),
        fmt::format("{} rows of {} tokens", rows.rows, rows.length)));
  models::HybridMetadata metadata;
  using Token = const TokenStructure&;
  if (needs.ids) {
    metadata.structure_kinds =
        per_token(rows, device, [](Token token, std::size_t) { return std::int32_t{token.kind}; });
    metadata.dependency_levels =
        per_token(rows, device, [](Token token, std::size_t) { return std::int32_t{token.level}; });
    metadata.syntax_depths =
        per_token(rows, device, [](Token token, std::size_t) { return std::int32_t{token.depth}; });
    metadata.sibling_indices =
        per_token(rows, device, [](Token token, std::size_t) { return ordinal(token.sibling); });
    metadata.node_types =
        per_token(rows, device, [](Token token, std::size_t) { return std::int32_t{token.node}; });
  }
  if (needs.parents)
    metadata.parents = per_token(rows, device, [&](Token token, std::size_t i) {
      const std::uint64_t place = i % static_cast<std::uint64_t>(rows.length);
      const std::uint64_t distance = token.parent_distance;
      return distance == 0 || distance > place ? -1 : static_cast<std::int32_t>(place - distance);
    });
  if (needs.relations > 0) metadata.relations = relations_of(needs.relations, rows, device);
  return metadata.keywords();
}

std::int64_t structure_bytes(const StructureNeeds& needs, std::int64_t rows, std::int64_t length) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(std::int32_t));
  const std::int64_t numbers = (needs.ids ? 5 : 0) + (needs.parents ? 1 : 0);
  return rows * length * (numbers * kBytes + needs.relations * length);
}

}  // namespace penstock::train
