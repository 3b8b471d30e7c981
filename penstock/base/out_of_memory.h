// Recognizes exceptions that mean that memory ran out: of LibTorch's allocators, of CUDA, of operator new.
#pragma once

#include <exception>
#include <optional>
#include <string>

namespace penstock {

// Returns what could not be allocated ("281.5 TB on the CPU"), or std::nullopt for an exception of another
// kind. An exception nested in one of Penstock's counts as well. LibTorch's exceptions are recognized by
// their text.
std::optional<std::string> out_of_memory(const std::exception& error);

}  // namespace penstock
