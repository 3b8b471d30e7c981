// Recognizes out-of-memory exceptions of LibTorch's allocators, CUDA and operator new.
#pragma once

#include <exception>
#include <optional>
#include <string>

namespace penstock {

// Returns what could not be allocated ("281.5 TB on the CPU"), without a backtrace, or std::nullopt for other
// exceptions. Also checks exceptions nested in a Penstock exception.
std::optional<std::string> out_of_memory(const std::exception& error);

}  // namespace penstock
