// What the standard library's file system lacks, or what cannot be relied on beside LibTorch.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

namespace penstock {

// Removes a file or a folder with all that is in it; links are removed, not followed. What is not there is no error.
//
// Use this instead of std::filesystem::remove_all: PyTorch's own builds of LibTorch export a copy of that function that calls
// a symbol nobody defines, and a program linked to them jumps to address zero (seen with 2.11).
void remove_tree(const std::filesystem::path& path, std::error_code& error) noexcept;

// Throws std::filesystem::filesystem_error.
void remove_tree(const std::filesystem::path& path);

// All bytes of a file or of a pipe. Throws ConfigError "WHAT PATH: got Is a directory, expected a file that can be read; REMEDY". Folders
// and devices are refused before anything is read: a stream of the standard library throws at the one and never ends at the other.
std::string read_file(const std::filesystem::path& path, std::string_view what, std::string_view remedy);

// Whether something is there. Unlike the standard function it does not throw for names that no file can have; what cannot be looked at is
// not there.
bool file_exists(const std::filesystem::path& path) noexcept;

}  // namespace penstock
