#include "penstock/pipeline/contract/record_checks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/warnings.h"
#include "penstock/errors.h"

namespace penstock {

namespace {

constexpr const char* kAgree =
    "pass examples that match the tensors of real steps, or pass none and let the records be inferred";

std::string joined(const std::vector<std::string>& lines) {
  return fmt::format("{}", fmt::join(lines, "; "));
}

// Throws or warns about the differences found at `where`.
void report(const std::string& where, const std::vector<std::string>& found, OnMismatch on_mismatch) {
  switch (on_mismatch) {
    case OnMismatch::Raise:
      throw PipeliningMetadataError(fmt::format("{}: {}; {}", where, joined(found), kAgree));
    case OnMismatch::Warn:
      warn("pipeline",
           fmt::format("{}: {}; the dynamically inferred record is used instead", where, joined(found)));
      return;
    case OnMismatch::Collect:
      return;
  }
}

std::string presence(const std::optional<TensorMeta>& meta) { return meta ? kind_text(*meta) : "nothing"; }

[[noreturn]] void refuse_argument(std::string_view where, std::string_view actual,
                                  std::string_view expected) {
  throw PipeliningMetadataError(
      describe(where, actual, expected,
               "positional arguments of a stage are tensors that travel between stages; pass "
               "everything else as a keyword argument"));
}

std::string kind_name(Tree::Kind kind) {
  switch (kind) {
    case Tree::Kind::None:
      return "None";
    case Tree::Kind::Tensor:
      return "a tensor";
    case Tree::Kind::Bool:
      return "a bool";
    case Tree::Kind::Int:
      return "an int";
    case Tree::Kind::Double:
      return "a double";
    case Tree::Kind::String:
      return "a string";
    case Tree::Kind::Object:
      return "an object";
    case Tree::Kind::Tuple:
      return "a tuple";
    case Tree::Kind::List:
      return "a list";
    case Tree::Kind::Dict:
      return "a dictionary";
  }
  invariant_failed("kind", __FILE__, __LINE__, "a tree kind without a name");
}

}  // namespace

TensorMetas metas_of(const std::vector<at::Tensor>& tensors) {
  TensorMetas metas;
  metas.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    if (!tensor.defined())
      throw PipeliningMetadataError(
          describe("records of tensors", fmt::format("nothing at [{}]", metas.size()), "a tensor",
                   "use optional_metas_of where entries may be missing, as for gradients"));
    metas.push_back(meta_of(tensor));
  }
  return metas;
}

OptionalTensorMetas optional_metas_of(const std::vector<at::Tensor>& tensors) {
  OptionalTensorMetas metas;
  metas.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    if (tensor.defined()) {
      metas.emplace_back(meta_of(tensor));
    } else {
      metas.emplace_back(std::nullopt);
    }
  }
  return metas;
}

std::optional<TensorMetas> metas_of(const std::optional<std::vector<at::Tensor>>& tensors) {
  if (!tensors) return std::nullopt;
  return metas_of(*tensors);
}

std::optional<OptionalTensorMetas> optional_metas_of(const std::optional<std::vector<at::Tensor>>& tensors) {
  if (!tensors) return std::nullopt;
  return optional_metas_of(*tensors);
}

std::optional<std::vector<at::Tensor>> stage_arguments(const Tree& args, Missing missing,
                                                       std::string_view name) {
  if (args.is_none()) return std::nullopt;
  if (args.is_tensor()) return std::vector<at::Tensor>{args.tensor()};
  if (args.kind() != Tree::Kind::Tuple && args.kind() != Tree::Kind::List)
    refuse_argument(name, kind_name(args.kind()), "a tensor, or a tuple or list of tensors");
  std::vector<at::Tensor> tensors;
  tensors.reserve(args.size());
  for (const Tree& entry : args.entries()) {
    const bool allowed = entry.is_tensor() || (entry.is_none() && missing == Missing::Allow);
    if (!allowed)
      refuse_argument(fmt::format("{}[{}]", name, tensors.size()), kind_name(entry.kind()), "a tensor");
    tensors.push_back(entry.is_none() ? at::Tensor() : entry.tensor());
  }
  return tensors;
}

std::vector<std::string> check_meta(std::string_view what, const TensorMeta& expected,
                                    const TensorMeta& actual, OnMismatch on_mismatch) {
  // Fields of different kinds mean different things (a local shape is not a shape), so only the kinds are
  // compared if they differ.
  std::vector<std::string> found;
  if (is_distributed(expected) != is_distributed(actual)) {
    found.push_back(describe("kind", kind_text(actual), kind_text(expected)));
  } else {
    found = differences(expected, actual);
  }
  if (!found.empty()) report(std::string(what), found, on_mismatch);
  return found;
}

std::vector<std::string> check_meta(std::string_view what, const TensorMeta& expected,
                                    const at::Tensor& actual, OnMismatch on_mismatch) {
  return check_meta(what, expected, meta_of(actual), on_mismatch);
}

std::vector<std::string> check_metas(std::string_view what, const MetaList& expected, const MetaList& actual,
                                     OnMismatch on_mismatch) {
  const std::size_t count = expected.metas.size();
  if (actual.metas.size() != count) {
    const std::vector<std::string> found = {
        describe("tensors", std::to_string(actual.metas.size()), std::to_string(count))};
    report(std::string(what), found, on_mismatch);
    return {fmt::format("{}: {}", what, found.front())};
  }
  std::vector<std::string> all;
  for (std::size_t i = 0; i < count; ++i) {
    const auto& left = expected.metas[i];
    const auto& right = actual.metas[i];
    if (!left && !right) continue;
    const std::string where = fmt::format("{}[{}]", what, i);
    std::vector<std::string> found;
    if (left && right) {
      found = check_meta(where, *left, *right, on_mismatch);
    } else {
      found = {describe("entry", presence(right), presence(left))};
      report(where, found, on_mismatch);
    }
    for (const std::string& line : found) all.push_back(fmt::format("{}: {}", where, line));
  }
  return all;
}

std::vector<std::string> requires_grad_differences(const MetaList& expected, const MetaList& actual) {
  std::vector<std::string> all;
  for (std::size_t i = 0; i < std::min(expected.metas.size(), actual.metas.size()); ++i) {
    if (!expected.metas[i] || !actual.metas[i]) continue;
    for (const std::string& line : requires_grad_differences(*expected.metas[i], *actual.metas[i]))
      all.push_back(fmt::format("[{}]: {}", i, line));
  }
  return all;
}

}  // namespace penstock
