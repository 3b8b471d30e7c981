// File functions that the standard library lacks or that do not work when linked with LibTorch.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

namespace penstock {

// Removes a file, or a folder with its contents. Links are removed, not followed. A missing path is not an
// error.
//
// Use this instead of std::filesystem::remove_all: the official LibTorch builds export a copy of that
// function that calls an undefined symbol, and a program linked with them jumps to address zero (seen with
// 2.11).
void remove_tree(const std::filesystem::path& path, std::error_code& error) noexcept;

// Throws std::filesystem::filesystem_error.
void remove_tree(const std::filesystem::path& path);

// Reads all bytes of a file or pipe. Throws ConfigError "WHAT PATH: got Is a directory, expected a file that
// can be read; REMEDY". Folders and devices are refused before reading: a standard stream throws on a folder
// and may read from a device forever.
std::string read_file(const std::filesystem::path& path, std::string_view what, std::string_view remedy);

// Returns whether the path exists. Unlike std::filesystem::exists it does not throw for invalid names; a path
// that cannot be examined does not exist.
bool file_exists(const std::filesystem::path& path) noexcept;

}  // namespace penstock
