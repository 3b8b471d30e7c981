// The C++ compiler of the host, at run time: finds it, compiles generated source to shared objects, loads
// them.
//
//   const HostCompiler& compiler = host_compiler();
//   if (compiler.works()) {
//     const std::vector<ObjectCode> codes = compile_sources(compiler, {source});
//     const auto library = LoadedCode::load(codes[0].bytes);
//     auto* function = reinterpret_cast<KernelFunction*>(library->function("k0"));
//   }
//
// PENSTOCK_CXX names the compiler; else the first of g++, c++ and clang++ in PATH is used. Flags are tried
// once in a process: those for the processor at hand (-march=native), and, if they do not work, none.
// Sources are compiled in processes of their own, at the same time, in a temporary folder that is removed.
// Thread safety: any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace penstock::graph {

struct HostCompiler {
  std::string path;                // empty if there is none
  std::vector<std::string> flags;  // without input and output
  std::string identity;            // path, version, flags and processor: equal text, equal code
  std::string problem;             // why it cannot be used
  bool works() const { return problem.empty(); }
};

// The compiler that PENSTOCK_CXX and PATH name now. Tried at the first call with these values.
HostCompiler host_compiler();

using KernelFunction = void(void* const* buffers, std::int64_t begin, std::int64_t end);

struct ObjectCode {
  std::vector<std::uint8_t> bytes;  // of a shared object
  std::string problem;  // what went wrong, with the first lines of the compiler's output; else empty
  std::string output;   // of the compiler
};

// Compiles each source by itself, as many at the same time as there are processors. A compiler that runs for
// longer than `limit` is ended.
std::vector<ObjectCode> compile_sources(const HostCompiler& compiler, const std::vector<std::string>& sources,
                                        std::chrono::seconds limit = std::chrono::seconds(120));

// A shared object in this process, for as long as it exists.
class LoadedCode {
 public:
  // Throws StateError if the loader refuses it.
  static std::shared_ptr<const LoadedCode> load(std::span<const std::uint8_t> bytes);
  ~LoadedCode();
  LoadedCode(const LoadedCode&) = delete;
  LoadedCode& operator=(const LoadedCode&) = delete;

  // Null if there is no function of this name.
  KernelFunction* function(const std::string& name) const;

 private:
  explicit LoadedCode(void* handle) : handle_(handle) {}
  void* handle_;
};

// Writes source and text to a new folder for the user to look at. Returns "saved in FOLDER", or why that was
// not possible.
std::string save_for_inspection(const std::string& source, const std::string& text);

}  // namespace penstock::graph
