// The part of a captured call for dynamic dims: the values of its symbols in a call, and everything that
// depends on them.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "penstock/compile_options.h"
#include "penstock/graph/ir/symbolic_table.h"
#include "penstock/graph/trace/analyze.h"

namespace penstock::graph {

// A symbol and the input dims whose size it is.
struct DynamicSymbol {
  struct Place {
    std::size_t input = 0, dim = 0;
  };
  std::string name;
  std::vector<Place> places;
  std::int64_t min = 0, max = 0, multiple_of = 1;

  bool allows(std::int64_t size) const { return size >= min && size <= max && size % multiple_of == 0; }
  std::string range_text() const;  // "2 to 64, a multiple of 8"
};

// Returns the symbols of a call, in order of their first occurrence. Throws ValueError for an input or dim
// that does not exist, a parameter or buffer, an empty range, more than four symbols, and dims of one symbol
// that differ in this call.
std::vector<DynamicSymbol> symbols_of(const DynamicOptions& options, const Values& inputs,
                                      const Convention& convention);
// The size of the first dim of each symbol in a call.
SymbolValues sizes_of(const std::vector<DynamicSymbol>& symbols, const Values& inputs);

class DynamicCall {
 public:
  DynamicCall(std::vector<DynamicSymbol> symbols, std::shared_ptr<const SymbolicTable> table, bool trust)
      : symbols_(std::move(symbols)), table_(std::move(table)), trust_(trust) {}

  const SymbolicTable& table() const { return *table_; }
  const std::vector<DynamicSymbol>& symbols() const { return symbols_; }

  // Evaluates everything that depends on the symbols for a call with these inputs. Returns null, and sets
  // `why`, for a call of another kind. Repeated sizes are cached.
  c10::intrusive_ptr<BoundSizes> bind(const Values& inputs, std::string* why = nullptr);

  // Whether the graph must first be compared with a capture at these sizes.
  bool needs_check(BoundSizes& sizes) const;
  void mark_checked(BoundSizes& sizes);
  std::size_t checked() const { return checked_.size(); }
  // All sizes that were checked, to be kept with the capture.
  std::vector<SymbolValues> checked_sizes() const { return {checked_.begin(), checked_.end()}; }
  void set_checked_sizes(const std::vector<SymbolValues>& sizes) { checked_ = {sizes.begin(), sizes.end()}; }

 private:
  c10::intrusive_ptr<BoundSizes> bound_to(const SymbolValues& sizes, std::string* why);

  std::vector<DynamicSymbol> symbols_;
  std::shared_ptr<const SymbolicTable> table_;
  bool trust_ = false;
  c10::intrusive_ptr<BoundSizes> last_;
  std::map<SymbolValues, c10::intrusive_ptr<BoundSizes>> bound_;  // the most recent ones
  std::set<SymbolValues> checked_;
};

}  // namespace penstock::graph
