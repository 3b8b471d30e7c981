// Identifies the running program: another build of it, or of the libraries that belong to it, has another
// text.
//
// It is made of the program's file and of every shared library that it has loaded, except those of the system
// and of LibTorch, which have a version of their own in keys. Each is identified by its GNU build id, or by a
// hash of the file if it was linked without one. Thread safety: any thread.
#pragma once

#include <string>

namespace penstock::graph {

// 32 hexadecimal digits; found once in a process, at the first call.
const std::string& program_id();

namespace detail {
// The GNU build id in the notes of an ELF segment, as hexadecimal digits; empty if there is none.
std::string build_id_in_notes(const unsigned char* notes, std::size_t size);
}  // namespace detail

}  // namespace penstock::graph
