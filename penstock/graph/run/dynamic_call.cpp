#include "penstock/graph/run/dynamic_call.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock::graph {
namespace {

constexpr std::size_t kMaxSymbols = 4;
constexpr std::size_t kKeptSizes = 256;

bool has_dims(const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); }

std::size_t place_of(const InputRef& ref, const Values& inputs, const Convention& convention) {
  if (const auto* place = std::get_if<std::size_t>(&ref.get())) {
    if (*place >= inputs.size())
      throw ValueError(describe(
          "graph: input of a dynamic dim", std::to_string(static_cast<std::int64_t>(*place)),
          fmt::format("one of 0 to {}", inputs.size() - 1), "count the inputs of the function from 0"));
    return *place;
  }
  const std::string& name = std::get<std::string>(ref.get());
  const auto found = std::find(convention.names.begin(), convention.names.end(), name);
  if (found != convention.names.end()) return static_cast<std::size_t>(found - convention.names.begin());
  const auto first = convention.names.begin() +
                     static_cast<std::ptrdiff_t>(std::min(convention.found, convention.names.size()));
  throw ValueError(fmt::format(
      "graph: a dynamic dim refers to input '{}', which this function does not have; it has {}", name,
      convention.names.empty() ? "inputs without names: use a number"
                               : fmt::format("'{}'", fmt::join(first, convention.names.end(), "', '"))));
}

}  // namespace

std::string DynamicSymbol::range_text() const {
  std::string text = max == std::numeric_limits<std::int64_t>::max() ? fmt::format("{} or more", min)
                                                                     : fmt::format("{} to {}", min, max);
  if (multiple_of != 1) text += fmt::format(", a multiple of {}", multiple_of);
  return text;
}

std::vector<DynamicSymbol> symbols_of(const DynamicOptions& options, const Values& inputs,
                                      const Convention& convention) {
  std::vector<DynamicSymbol> symbols;
  for (std::size_t i = 0; i < options.dims.size(); ++i) {
    const DynamicDim& dim = options.dims[i];
    const std::size_t input = place_of(dim.input, inputs, convention);
    const std::string who = convention.name_of(input);
    if (input < convention.found)
      throw ValueError(fmt::format(
          "graph: {} is a parameter or buffer, which cannot have dynamic dims; mark dims of arguments", who));
    if (dim.multiple_of < 1)
      throw ValueError(describe(fmt::format("graph: multiple_of for {}", who),
                                std::to_string(dim.multiple_of), "1 or more"));
    if (!has_dims(inputs[input])) continue;
    const at::Tensor& tensor = inputs[input].toTensor();
    if (dim.dim < -tensor.dim() || dim.dim >= tensor.dim())
      throw ValueError(describe(fmt::format("graph: a dynamic dim of {}", who), std::to_string(dim.dim),
                                fmt::format("a dim of sizes [{}]", fmt::join(tensor.sizes(), ", ")),
                                "mark an existing dim of the tensor"));
    const DynamicSymbol::Place place{
        input, static_cast<std::size_t>(dim.dim < 0 ? dim.dim + tensor.dim() : dim.dim)};
    const std::string name = dim.symbol.empty() ? fmt::format("s{}", i) : dim.symbol;
    auto symbol = std::find_if(symbols.begin(), symbols.end(),
                               [&](const DynamicSymbol& other) { return other.name == name; });
    if (symbol == symbols.end()) {
      symbols.push_back({name, {place}, dim.min, dim.max, dim.multiple_of});
      symbol = symbols.end() - 1;
    } else {
      const DynamicSymbol::Place& first = symbol->places[0];
      const std::int64_t is = tensor.size(static_cast<std::int64_t>(place.dim));
      const std::int64_t was = inputs[first.input].toTensor().size(static_cast<std::int64_t>(first.dim));
      if (is != was)
        throw ValueError(
            fmt::format("graph: dim {} of {} has size {}, and dim {} of {} has size {}, but both are {}; "
                        "pass tensors that agree, or "
                        "give the dims different symbols",
                        place.dim, who, is, first.dim, convention.name_of(first.input), was, name));
      symbol->places.push_back(place);
      symbol->min = std::max(symbol->min, dim.min);
      symbol->max = std::min(symbol->max, dim.max);
      symbol->multiple_of = std::lcm(symbol->multiple_of, dim.multiple_of);
    }
    if (symbol->min > symbol->max)
      throw ValueError(
          fmt::format("graph: symbol {} must be at least {} and at most {}; give it a non-empty range", name,
                      symbol->min, symbol->max));
  }
  if (symbols.size() > kMaxSymbols)
    throw ValueError(describe("graph: number of symbols of dynamic dims", std::to_string(symbols.size()),
                              fmt::format("at most {}", kMaxSymbols),
                              "use one symbol for dims that are always equal"));
  return symbols;
}

SymbolValues sizes_of(const std::vector<DynamicSymbol>& symbols, const Values& inputs) {
  SymbolValues sizes;
  for (const DynamicSymbol& symbol : symbols)
    sizes.push_back(
        inputs[symbol.places[0].input].toTensor().size(static_cast<std::int64_t>(symbol.places[0].dim)));
  return sizes;
}

bool DynamicCall::needs_check(BoundSizes& sizes) const {
  if (sizes.checked) [[likely]]
    return false;
  const bool trusted = trust_ && std::all_of(sizes.values.begin(), sizes.values.end(),
                                             [](std::int64_t size) { return size > 1; });
  sizes.checked = trusted || checked_.contains(sizes.values);
  return !sizes.checked;
}

void DynamicCall::mark_checked(BoundSizes& sizes) {
  sizes.checked = true;
  checked_.insert(sizes.values);
}

c10::intrusive_ptr<BoundSizes> DynamicCall::bind(const Values& inputs, std::string* why) {
  c10::SmallVector<std::int64_t, 4> sizes;
  for (const DynamicSymbol& symbol : symbols_) {
    const DynamicSymbol::Place& place = symbol.places[0];
    if (place.input >= inputs.size() || !has_dims(inputs[place.input])) return {};
    const at::Tensor& tensor = inputs[place.input].toTensor();
    if (static_cast<std::int64_t>(place.dim) >= tensor.dim()) return {};
    sizes.push_back(tensor.sizes()[place.dim]);
  }
  if (last_ && c10::IntArrayRef(sizes) == c10::IntArrayRef(last_->values)) [[likely]]
    return last_;
  for (std::size_t i = 0; i < symbols_.size(); ++i)
    if (!symbols_[i].allows(sizes[i])) {
      if (why)
        *why =
            fmt::format("{} is {}, in the capture {}", symbols_[i].name, sizes[i], symbols_[i].range_text());
      return {};
    }
  return bound_to(SymbolValues(sizes.begin(), sizes.end()), why);
}

c10::intrusive_ptr<BoundSizes> DynamicCall::bound_to(const SymbolValues& sizes, std::string* why) {
  if (const auto known = bound_.find(sizes); known != bound_.end()) return last_ = known->second;
  std::string reason;
  auto bound = table_->at(sizes, &reason);
  if (!bound) {
    if (why) *why = fmt::format("the graph cannot be evaluated for {}: {}", table_->text_of(sizes), reason);
    return {};
  }
  if (bound_.size() >= kKeptSizes) bound_.clear();
  bound_.emplace(sizes, bound);
  return last_ = std::move(bound);
}

}  // namespace penstock::graph
