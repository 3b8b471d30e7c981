// The part of a captured call that is there only for dynamic dims: which sizes its symbols have in a call, and everything that depends on them.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "penstock/graph/trace/analyze.h"
#include "penstock/graph/ir/dynamic_dims.h"
#include "penstock/graph/ir/symbolic_table.h"

namespace penstock::graph {

// A symbol and the dims of inputs that it is the size of.
struct DynamicSymbol {
  struct Place {
    std::size_t input = 0, dim = 0;
  };
  std::string name;
  std::vector<Place> places;
  std::int64_t min = 0, max = 0, multiple_of = 1;

  bool allows(std::int64_t size) const { return size >= min && size <= max && size % multiple_of == 0; }
  std::string range_text() const;   // "2 to 64, a multiple of 8"
};

// The symbols of a call, in the order in which they are named. Throws ValueError for an input or dim that is not there, a parameter or buffer, a range
// without a size, more than four symbols, and dims of one symbol that differ in this call.
std::vector<DynamicSymbol> symbols_of(const DynamicOptions& options, const Values& inputs, const Convention& convention);
// What the first dim of each is in a call.
SymbolValues sizes_of(const std::vector<DynamicSymbol>& symbols, const Values& inputs);

class DynamicCall {
 public:
  DynamicCall(std::vector<DynamicSymbol> symbols, std::shared_ptr<const SymbolicTable> table, bool trust)
      : symbols_(std::move(symbols)), table_(std::move(table)), trust_(trust) {}

  const SymbolicTable& table() const { return *table_; }
  const std::vector<DynamicSymbol>& symbols() const { return symbols_; }

  // What depends on the symbols in a call with these inputs; null, and `why`, when it is a call of another kind. Sizes that repeat cost nothing.
  c10::intrusive_ptr<BoundSizes> bind(const Values& inputs, std::string* why = nullptr);

  // Whether the graph must be compared with a capture at these sizes first.
  bool needs_check(BoundSizes& sizes) const;
  void mark_checked(BoundSizes& sizes);
  std::size_t checked() const { return checked_.size(); }

 private:
  c10::intrusive_ptr<BoundSizes> bound_to(const SymbolValues& sizes, std::string* why);

  std::vector<DynamicSymbol> symbols_;
  std::shared_ptr<const SymbolicTable> table_;
  bool trust_ = false;
  c10::intrusive_ptr<BoundSizes> last_;
  std::map<SymbolValues, c10::intrusive_ptr<BoundSizes>> bound_;   // the most recent ones
  std::set<SymbolValues> checked_;
};

}  // namespace penstock::graph
