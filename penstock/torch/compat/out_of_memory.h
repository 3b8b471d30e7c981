// Whether an exception says that memory ran out, whoever allocated: LibTorch's allocators, CUDA's, operator new.
#pragma once

#include <exception>
#include <optional>
#include <string>

namespace penstock {

// What could not be had ("281.5 TB on the CPU"), without backtrace; std::nullopt for an exception of another kind. An exception that is nested
// in one of ours counts, too.
std::optional<std::string> out_of_memory(const std::exception& error);

}  // namespace penstock
