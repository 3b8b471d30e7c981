// Where documents begin in packed rows.
//
//   // documents [batch, length]: 7 7 7 2 2 9
//   at::Tensor starts = document_starts(documents);   // -1 -1 -1 3 3 5
//
// A document is a run of equal numbers: it begins where the number differs from that of the token before. The
// first document of a row may continue what came before the row, so its beginning is -1. A token may use
// token s of its row if and only if s >= starts[token].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock {

// Returns int32 [batch, length], contiguous, on the device of `documents` (any integer dtype). Nothing waits
// for the device.
at::Tensor document_starts(const at::Tensor& documents);

// Throws ValueError, naming `what`, unless `documents` are integers [batch, length].
void check_documents(const char* what, const at::Tensor& documents, std::int64_t batch, std::int64_t length);

}  // namespace penstock
