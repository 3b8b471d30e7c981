#include "penstock/models/plan/parameter_stages.h"

#include <fmt/format.h>

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <system_error>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::models {
namespace {

constexpr std::string_view kBlocks = "blocks.";
constexpr std::string_view kFirstBlock = "blocks.0.";

}  // namespace

ParameterStages::ParameterStages(const std::vector<StagePart>& parts, const TransformerOptions& options)
    : of_block_(static_cast<std::size_t>(options.layers)) {
  for (const StagePart& part : parts) {
    for (std::int64_t block = part.first_block; block < part.end_block; ++block)
      of_block_.at(static_cast<std::size_t>(block)).push_back(part.index);
    if (part.has_embed() || (part.has_head() && options.tie_head)) of_embed_.push_back(part.index);
    if (part.has_head()) of_head_.push_back(part.index);
  }
  // Block names are those of the first block, model names those of a model without blocks.
  TransformerOptions one = options;
  one.layers = 1;
  for (ParameterShape& shape : parameter_shapes(one)) {
    if (shape.name.starts_with(kFirstBlock)) {
      in_block_.insert(shape.name.substr(kFirstBlock.size()));
    } else {
      in_none_.insert(std::move(shape.name));
    }
  }
}

const std::vector<int>& ParameterStages::of(const std::string& name) const {
  if (in_none_.contains(name)) return name == "embed.weight" ? of_embed_ : of_head_;
  const std::size_t digits = kBlocks.size(), dot = name.find('.', digits);
  if (name.starts_with(kBlocks) && dot != std::string::npos && in_block_.contains(name.substr(dot + 1))) {
    std::size_t block = of_block_.size();
    const auto [stop, error] = std::from_chars(name.data() + digits, name.data() + dot, block);
    if (error == std::errc{} && stop == name.data() + dot && block < of_block_.size())
      return of_block_[block];
  }
  throw ValueError(
      describe("parameter", fmt::format("'{}'", name), "a name of the model, like blocks.0.feed.up.weight"));
}

std::vector<int> stages_of_parameter(const std::vector<StagePart>& parts, const TransformerOptions& options,
                                     const std::string& name) {
  return ParameterStages(parts, options).of(name);
}

}  // namespace penstock::models
