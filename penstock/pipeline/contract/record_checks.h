// Extracts records from tensors and compares records with the expected ones.
//
//   auto tensors = stage_arguments(args);                                    // one tensor, a list or a tuple
//   check_metas("stage 1 inputs", expected, *tensors);                       // throws at the first mismatch
//   auto found = check_metas("stage 1 inputs", expected, actual, OnMismatch::Warn);
//
// What is compared: kind (plain or distributed), shape, stride, dtype, and for distributed tensors global
// shape and stride, placements and mesh. requires_grad is not compared; use requires_grad_differences for
// that. Warnings are issued through base/warnings.h under "pipeline". Missing entries are undefined tensors
// or empty optionals.
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

// Throws PipeliningMetadataError with the index of a missing entry.
TensorMetas metas_of(const std::vector<at::Tensor>& tensors);
// Keeps missing entries.
OptionalTensorMetas optional_metas_of(const std::vector<at::Tensor>& tensors);
// Return std::nullopt for std::nullopt.
std::optional<TensorMetas> metas_of(const std::optional<std::vector<at::Tensor>>& tensors);
std::optional<OptionalTensorMetas> optional_metas_of(const std::optional<std::vector<at::Tensor>>& tensors);

// ---- arguments ----

enum class Missing { Refuse, Allow };

// Returns the positional arguments of a stage as a flat list: std::nullopt for None, a list of one for a
// tensor, the entries of a list or tuple (missing ones as undefined tensors if they are allowed). Throws
// PipeliningMetadataError with the position of a missing entry, of an entry that is not a tensor, or of any
// other container: only tensors travel between stages, everything else must be a keyword argument.
std::optional<std::vector<at::Tensor>> stage_arguments(const Tree& args, Missing missing = Missing::Refuse,
                                                       std::string_view name = "args");

// ---- validation ----

enum class OnMismatch {
  Raise,    // PipeliningMetadataError
  Warn,     // a warning that the dynamically inferred record is used, and the list
  Collect,  // only the list
};

// Returns the differences, empty for a match. A plain record compared with a distributed one is a single
// difference, regardless of the fields. `what` is the beginning of the error or warning: "stage 1 input".
std::vector<std::string> check_meta(std::string_view what, const TensorMeta& expected,
                                    const TensorMeta& actual, OnMismatch on_mismatch = OnMismatch::Collect);
std::vector<std::string> check_meta(std::string_view what, const TensorMeta& expected,
                                    const at::Tensor& actual, OnMismatch on_mismatch = OnMismatch::Collect);

// A common form for lists of records and lists of tensors, so that they can be compared.
struct MetaList {
  MetaList(const TensorMetas& records) : metas(records.begin(), records.end()) {}
  MetaList(OptionalTensorMetas records) : metas(std::move(records)) {}
  MetaList(const std::vector<at::Tensor>& tensors) : metas(optional_metas_of(tensors)) {}
  OptionalTensorMetas metas;
};

// Compares entry by entry; each difference begins with its position, "stage 1 inputs[2]: ". Two missing
// entries match. If the lengths differ, that is the only difference reported. With Raise, throws at the first
// entry that differs.
std::vector<std::string> check_metas(std::string_view what, const MetaList& expected, const MetaList& actual,
                                     OnMismatch on_mismatch = OnMismatch::Raise);

// Returns where requires_grad differs, for entries present in both lists: "[2]: requires_grad: got false,
// expected true".
std::vector<std::string> requires_grad_differences(const MetaList& expected, const MetaList& actual);

}  // namespace penstock
