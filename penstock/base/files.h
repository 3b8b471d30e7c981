// What the standard library's file system lacks, or what cannot be relied on beside LibTorch.
#pragma once

#include <filesystem>
#include <system_error>

namespace penstock {

// Removes a file or a folder with all that is in it; links are removed, not followed. What is not there is no error.
//
// Use this instead of std::filesystem::remove_all: PyTorch's own builds of LibTorch export a copy of that function that calls
// a symbol nobody defines, and a program linked to them jumps to address zero (seen with 2.11).
void remove_tree(const std::filesystem::path& path, std::error_code& error) noexcept;

// Throws std::filesystem::filesystem_error.
void remove_tree(const std::filesystem::path& path);

}  // namespace penstock
