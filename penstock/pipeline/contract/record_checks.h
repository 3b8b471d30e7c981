// Tensors into records, and records against what was expected.
//
//   auto tensors = stage_arguments(args);                                    // one tensor, a list or a tuple
//   check_metas("stage 1 inputs", expected, *tensors);                       // throws at the first mismatch
//   auto found = check_metas("stage 1 inputs", expected, actual, OnMismatch::Warn);
//
// Compared is the contract: kind (plain or distributed), shape, stride, dtype, and for distributed tensors
// global shape and stride, placements and mesh. requires_grad is not part of it; ask
// requires_grad_differences for that. Warnings go through base/warnings.h under "pipeline". Missing entries
// are undefined tensors or empty optionals.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/pytree.h"
#include "penstock/torch/tree/tensor_meta.h"

namespace penstock {

// ---- extraction ----

// Throws PipeliningMetadataError, with the index, for a missing entry.
TensorMetas metas_of(const std::vector<at::Tensor>& tensors);
// Keeps missing entries.
OptionalTensorMetas optional_metas_of(const std::vector<at::Tensor>& tensors);
// Nothing in, nothing out.
std::optional<TensorMetas> metas_of(const std::optional<std::vector<at::Tensor>>& tensors);
std::optional<OptionalTensorMetas> optional_metas_of(const std::optional<std::vector<at::Tensor>>& tensors);

// ---- arguments ----

enum class Missing { Refuse, Allow };

// Positional arguments of a stage as a flat list: None gives nothing, a tensor a list of one, a list or tuple
// its entries (missing ones as undefined tensors where they are allowed). Throws PipeliningMetadataError with
// the place for a missing entry, an entry that is no tensor, and any other container: what travels between
// stages are tensors, everything else is a keyword argument.
std::optional<std::vector<at::Tensor>> stage_arguments(const Tree& args, Missing missing = Missing::Refuse,
                                                       std::string_view name = "args");

// ---- validation ----

enum class OnMismatch {
  Raise,    // PipeliningMetadataError
  Warn,     // a warning that the dynamically inferred record is used, and the list
  Collect,  // the list alone
};

// The differences, empty for a match. A plain record against a distributed one is one difference, whatever
// the fields. `what` opens the error or the warning: "stage 1 input".
std::vector<std::string> check_meta(std::string_view what, const TensorMeta& expected,
                                    const TensorMeta& actual, OnMismatch on_mismatch = OnMismatch::Collect);
std::vector<std::string> check_meta(std::string_view what, const TensorMeta& expected,
                                    const at::Tensor& actual, OnMismatch on_mismatch = OnMismatch::Collect);

// Records and tensors in the one form that lists are compared in.
struct MetaList {
  MetaList(const TensorMetas& records) : metas(records.begin(), records.end()) {}
  MetaList(OptionalTensorMetas records) : metas(std::move(records)) {}
  MetaList(const std::vector<at::Tensor>& tensors) : metas(optional_metas_of(tensors)) {}
  OptionalTensorMetas metas;
};

// Entry by entry; each difference begins with its place, "stage 1 inputs[2]: ". Two missing entries match.
// Another length is the only difference reported then. With Raise the first entry that differs throws.
std::vector<std::string> check_metas(std::string_view what, const MetaList& expected, const MetaList& actual,
                                     OnMismatch on_mismatch = OnMismatch::Raise);

// Where requires_grad differs, for entries that both lists have: "[2]: requires_grad: got false, expected
// true".
std::vector<std::string> requires_grad_differences(const MetaList& expected, const MetaList& actual);

}  // namespace penstock
