// Numbers that depend on sizes known only when a graph is called: "B", "B*T + 3", "(T^2 + T)/2", "1/(B*T)".
//
//   SizeFitter fitter({"B", "T"}, {{3, 5}, {4, 9}, {5, 6}, {6, 11}, {7, 8}, {9, 7}, {8, 10}});
//   const auto rows = fitter.fit({15, 36, 30, 66, 56, 63, 80});     // B*T
//   rows->at({2, 6});                                                // 12
//
// An expression is fitted to its values at some points, the sizes at which a function was captured: it is the
// polynomial with the fewest terms that is correct at all of them. There are always more points than terms,
// so a wrong one is unlikely; whether it is correct elsewhere cannot be derived from the points, and callers
// must check it there.
// Does not depend on Torch. Thread safety: that of a standard container.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace penstock::graph {

// One value for each symbol.
using SymbolValues = std::vector<std::int64_t>;

// A polynomial with integer coefficients divided by an integer. Its variables are the symbols, then quotients
// of them (SymbolSet).
class SizeExpression {
 public:
  struct Term {
    std::int64_t coefficient = 0;
    std::vector<std::uint8_t> exponents;  // of the variables; missing ones are 0
    bool operator==(const Term&) const = default;
  };

  SizeExpression() = default;  // 0
  explicit SizeExpression(std::vector<Term> terms, std::int64_t divisor = 1)
      : terms_(std::move(terms)), divisor_(divisor) {}
  static SizeExpression constant(std::int64_t value);
  static SizeExpression variable(std::size_t index);

  const std::vector<Term>& terms() const { return terms_; }
  std::int64_t divisor() const { return divisor_; }
  bool is_constant() const;
  bool uses(std::size_t variable) const;
  // Returns std::nullopt if the divisor does not divide the value or a number is out of range.
  std::optional<std::int64_t> at(std::span<const std::int64_t> variables) const;
  // "B*T + 3"; with parentheses if it is needed inside a product.
  std::string text(std::span<const std::string> names, bool in_product = false) const;

  bool operator==(const SizeExpression&) const = default;

 private:
  std::vector<Term> terms_;
  std::int64_t divisor_ = 1;
};

// A floating-point number: factor * e, factor / e, or the same with the square root of e; in double
// precision, in this order of operations.
struct NumberExpression {
  enum class Form : std::uint8_t { Multiple, Quotient, MultipleOfRoot, QuotientOfRoot };
  Form form = Form::Multiple;
  double factor = 1;
  SizeExpression size;

  static double combine(Form form, double factor, double size);
  std::optional<double> at(std::span<const std::int64_t> variables) const;
  std::string text(std::span<const std::string> names) const;
  bool operator==(const NumberExpression&) const = default;
};

// Symbols, and floors of quotients of them: the output length of a convolution with stride 2 is "(T - 1)//2".
class SymbolSet {
 public:
  struct Quotient {
    SizeExpression numerator;
    std::int64_t divisor = 1;
  };
  explicit SymbolSet(std::vector<std::string> names = {})
      : names_(std::move(names)), symbols_(names_.size()) {}

  std::size_t symbols() const { return symbols_; }
  std::size_t variables() const { return names_.size(); }
  const std::vector<std::string>& names() const { return names_; }  // of variables
  // Adds floor(numerator / divisor) as a variable; the numerator may use all variables so far.
  void add_quotient(SizeExpression numerator, std::int64_t divisor);
  const std::vector<Quotient>& quotients() const { return quotients_; }
  // The values of the symbols, then those of the quotients. Returns std::nullopt if one is out of range.
  std::optional<SymbolValues> variables_at(const SymbolValues& symbols) const;
  // Whether a variable is this symbol or is computed from it.
  bool depends(std::size_t variable, std::size_t symbol) const;

 private:
  std::vector<std::string> names_;
  std::size_t symbols_ = 0;
  std::vector<Quotient> quotients_;
};

class SizeFitter {
 public:
  // Each point has one value for each symbol. Throws ValueError for fewer than two points or points of
  // different length.
  SizeFitter(std::vector<std::string> names, std::vector<SymbolValues> points);

  const SymbolSet& symbols() const { return symbols_; }

  // Returns the expression that has these values at the points, one value for each point, or std::nullopt if
  // there is none.
  std::optional<SizeExpression> fit(const std::vector<std::int64_t>& values);
  // The same for the size of a dim, which may be the floor of a quotient that was not seen before.
  std::optional<SizeExpression> fit_size(const std::vector<std::int64_t>& values);
  // Must match the values bit for bit.
  std::optional<NumberExpression> fit(const std::vector<double>& values);

 private:
  using Residue = std::uint64_t;

  void list_monomials();
  std::optional<SizeExpression> search(const std::vector<std::int64_t>& values, std::size_t max_terms) const;
  std::optional<SizeExpression> solve(const std::vector<std::size_t>& support,
                                      const std::vector<std::int64_t>& values) const;
  bool holds(const SizeExpression& expression, const std::vector<std::int64_t>& values) const;
  std::optional<NumberExpression> fit_number(NumberExpression::Form form, double factor,
                                             const std::vector<double>& values);

  SymbolSet symbols_;
  std::vector<SymbolValues> points_;                  // with quotients
  std::vector<std::vector<std::uint8_t>> monomials_;  // as exponents, low degrees first
  std::vector<std::vector<Residue>> residues_;        // of each monomial, at each point
  std::map<std::vector<std::int64_t>, std::optional<SizeExpression>> known_;
};

}  // namespace penstock::graph
