#include "penstock/graph/codegen/host_compiler.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "penstock/base/env.h"
#include "penstock/base/files.h"
#include "penstock/base/quote.h"
#include "penstock/errors.h"

extern char** environ;

namespace penstock::graph {
namespace {

namespace fs = std::filesystem;

// A folder that is removed with its files.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (fs::temp_directory_path() / "penstock-fused-XXXXXX").string();
    if (!::mkdtemp(pattern.data()))
      throw StateError(
          fmt::format("graph: cannot make a folder {}: {}", pattern, std::generic_category().message(errno)));
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    if (!kept_) remove_tree(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const fs::path& path() const { return path_; }
  void keep() { kept_ = true; }

 private:
  fs::path path_;
  bool kept_ = false;
};

std::string text_of_file(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_file(const fs::path& file, std::string_view text) {
  std::ofstream out(file, std::ios::binary);
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  out.close();
  if (!out) throw StateError(fmt::format("graph: cannot write {}", file.string()));
}

std::string first_lines(const std::string& text, std::size_t lines) {
  std::size_t end = 0;
  while (lines-- > 0 && end < text.size()) end = std::min(text.find('\n', end), text.size() - 1) + 1;
  std::string first = text.substr(0, end);
  while (!first.empty() && first.back() == '\n') first.pop_back();
  return first;
}

// A process that writes all its output to a file.
class OutputProcess {
 public:
  OutputProcess(const std::vector<std::string>& command, const fs::path& output) {
    std::vector<char*> arguments;
    for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
    arguments.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    ::posix_spawn_file_actions_addopen(&actions, 1, output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    ::posix_spawn_file_actions_adddup2(&actions, 1, 2);
    // Signals that this process ignores or blocks are no concern of a compiler.
    posix_spawnattr_t attributes;
    ::posix_spawnattr_init(&attributes);
    sigset_t none, defaults;
    ::sigemptyset(&none);
    ::sigemptyset(&defaults);
    for (const int signal : {SIGCHLD, SIGPIPE, SIGINT, SIGTERM}) ::sigaddset(&defaults, signal);
    ::posix_spawnattr_setsigmask(&attributes, &none);
    ::posix_spawnattr_setsigdefault(&attributes, &defaults);
    ::posix_spawnattr_setflags(&attributes,
                               POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
    const int error = ::posix_spawnp(&pid_, arguments[0], &actions, &attributes, arguments.data(), environ);
    ::posix_spawnattr_destroy(&attributes);
    ::posix_spawn_file_actions_destroy(&actions);
    if (error != 0) {
      pid_ = -1;
      problem_ = fmt::format("cannot be started: {}", std::generic_category().message(error));
    }
  }

  OutputProcess(OutputProcess&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)), problem_(std::move(other.problem_)) {}
  OutputProcess& operator=(OutputProcess&&) = delete;
  ~OutputProcess() {
    if (pid_ > 0) end();
  }

  // Returns what went wrong, or an empty text.
  std::string wait(std::chrono::steady_clock::time_point deadline) {
    auto pause = std::chrono::microseconds(500);
    while (pid_ > 0) {
      int status = 0;
      const pid_t ended = ::waitpid(pid_, &status, WNOHANG);
      if (ended == pid_) {
        pid_ = -1;
        if (WIFSIGNALED(status)) problem_ = fmt::format("was ended by signal {}", WTERMSIG(status));
        if (WIFEXITED(status) && WEXITSTATUS(status) != 0)
          problem_ = fmt::format("ended with status {}", WEXITSTATUS(status));
      } else if (ended < 0 && errno != EINTR) {
        // Somebody else has waited for it; what it has written decides.
        pid_ = -1;
      } else if (std::chrono::steady_clock::now() > deadline) {
        end();
        problem_ = "took too long and was ended";
      } else {
        std::this_thread::sleep_for(pause);
        pause = std::min(2 * pause, std::chrono::microseconds(5000));
      }
    }
    return problem_;
  }

 private:
  // With the processes that it has started.
  void end() {
    int status = 0;
    ::kill(-pid_, SIGKILL);
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
  }

  pid_t pid_ = -1;
  std::string problem_;
};

std::vector<std::string> with(std::vector<std::string> flags, std::initializer_list<std::string> more) {
  flags.insert(flags.end(), more);
  return flags;
}

// Results must not depend on what a compiler may do to expressions.
std::vector<std::string> common_flags() {
  return {"-x",
          "c++",
          "-std=c++17",
          "-O3",
          "-fPIC",
          "-shared",
          "-nostdlib",
          "-ffp-contract=off",
          "-fwrapv",
          "-w",
          "-fno-math-errno",
          "-fno-trapping-math",
          "-fopenmp-simd",
          "-fno-exceptions",
          "-fno-rtti"};
}

// Sums with loops of the kinds that kernels have.
constexpr const char* kProbe =
    "extern \"C\" void probe(void* const* b, __INT64_TYPE__ begin, __INT64_TYPE__ end) {\n"
    "  const float* x = (const float*)b[0];\n"
    "  float s = 0;\n"
    "#pragma omp simd reduction(+ : s)\n"
    "  for (__INT64_TYPE__ j = begin; j < end; ++j) s += x[j] * 2.0f;\n"
    "  *(float*)b[1] = s;\n"
    "}\n";

// Empty if code that is compiled like this runs here.
std::string try_compiler(const HostCompiler& compiler) {
  const ObjectCode code = compile_sources(compiler, {kProbe})[0];
  if (!code.problem.empty()) return code.problem;
  const auto library = LoadedCode::load(code.bytes);
  KernelFunction* probe = library->function("probe");
  if (!probe) return "its shared object has no function";
  float numbers[37], sum = 0;
  for (int i = 0; i < 37; ++i) numbers[i] = static_cast<float>(i);
  void* buffers[] = {numbers, &sum};
  probe(buffers, 0, 37);
  return sum == 1332.f ? std::string() : fmt::format("its code computes {} instead of 1332", sum);
}

// What -march=native depends on.
std::string processor_text() {
  std::ifstream in("/proc/cpuinfo");
  std::string line, model, features;
  while (std::getline(in, line)) {
    const auto value = [&] {
      const std::size_t colon = line.find(':');
      return colon == std::string::npos ? std::string() : line.substr(colon + 1);
    };
    if (model.empty() && (line.starts_with("model name") || line.starts_with("CPU part"))) model = value();
    if (features.empty() && (line.starts_with("flags") || line.starts_with("Features"))) features = value();
  }
  return model + ";" + features;
}

HostCompiler try_compilers(const std::string& asked) {
  HostCompiler compiler;
  std::vector<std::string> candidates{"g++", "c++", "clang++"};
  if (!asked.empty()) candidates = {asked};
  std::string problems;
  for (const std::string& candidate : candidates) {
    compiler.path = candidate;
    for (const char* native : {"-march=native", "-mcpu=native", ""}) {
      compiler.flags = common_flags();
      if (*native) compiler.flags.emplace_back(native);
      try {
        compiler.problem = try_compiler(compiler);
      } catch (const Error& error) {
        compiler.problem = error.what();
      }
      if (compiler.problem.empty()) {
        const TemporaryFolder folder;
        const fs::path output = folder.path() / "version";
        OutputProcess({compiler.path, "--version"}, output)
            .wait(std::chrono::steady_clock::now() + std::chrono::seconds(20));
        compiler.identity = fmt::format("{}: {}; {}; {}", compiler.path, first_lines(text_of_file(output), 1),
                                        fmt::join(compiler.flags, " "), processor_text());
        return compiler;
      }
      if (compiler.problem.find("cannot be started") != std::string::npos) break;
    }
    problems += fmt::format("{}{}: {}", problems.empty() ? "" : "; ", candidate, compiler.problem);
  }
  compiler.path.clear();
  compiler.problem = asked.empty() ? fmt::format(
                                         "no C++ compiler works here ({}); install g++, or name one in "
                                         "PENSTOCK_CXX",
                                         problems)
                                   : fmt::format("PENSTOCK_CXX = {}: {}", quote(asked), compiler.problem);
  compiler.identity = "none";
  return compiler;
}

}  // namespace

HostCompiler host_compiler() {
  static std::mutex mutex;
  static std::map<std::pair<std::string, std::string>, HostCompiler> known;
  const std::pair key(env_text("PENSTOCK_CXX").value_or(""), env_text("PATH").value_or(""));
  const std::lock_guard lock(mutex);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  return known[key] = try_compilers(key.first);
}

std::vector<ObjectCode> compile_sources(const HostCompiler& compiler, const std::vector<std::string>& sources,
                                        std::chrono::seconds limit) {
  std::vector<ObjectCode> codes(sources.size());
  const std::size_t at_once = std::max(1u, std::thread::hardware_concurrency());
  const TemporaryFolder folder;
  const auto file = [&](std::size_t i, const char* kind) {
    return folder.path() / fmt::format("kernels{}.{}", i, kind);
  };
  for (std::size_t first = 0; first < sources.size(); first += at_once) {
    const std::size_t end = std::min(first + at_once, sources.size());
    std::vector<OutputProcess> running;
    for (std::size_t i = first; i < end; ++i) {
      write_file(file(i, "cpp"), sources[i]);
      std::vector<std::string> command{compiler.path};
      command.insert(command.end(), compiler.flags.begin(), compiler.flags.end());
      running.emplace_back(with(std::move(command), {file(i, "cpp").string(), "-o", file(i, "so").string()}),
                           file(i, "log"));
    }
    const auto deadline = std::chrono::steady_clock::now() + limit;
    for (std::size_t i = first; i < end; ++i) {
      ObjectCode& code = codes[i];
      code.problem = running[i - first].wait(deadline);
      code.output = text_of_file(file(i, "log"));
      const std::string object = code.problem.empty() ? text_of_file(file(i, "so")) : std::string();
      code.bytes.assign(object.begin(), object.end());
      if (code.problem.empty() && code.bytes.empty()) code.problem = "wrote no shared object";
      if (!code.problem.empty() && !code.output.empty())
        code.problem += fmt::format(", with the output {}", quote(first_lines(code.output, 3)));
    }
  }
  return codes;
}

std::shared_ptr<const LoadedCode> LoadedCode::load(std::span<const std::uint8_t> bytes) {
  const TemporaryFolder folder;
  const fs::path file = folder.path() / "code.so";
  write_file(file, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  void* handle = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* error = ::dlerror();
    throw StateError(
        fmt::format("graph: generated code cannot be loaded: {}", error ? error : "unknown error"));
  }
  return std::shared_ptr<const LoadedCode>(new LoadedCode(handle));
}

LoadedCode::~LoadedCode() { ::dlclose(handle_); }

KernelFunction* LoadedCode::function(const std::string& name) const {
  return reinterpret_cast<KernelFunction*>(::dlsym(handle_, name.c_str()));
}

std::string save_for_inspection(const std::string& source, const std::string& text) {
  try {
    TemporaryFolder folder;
    write_file(folder.path() / "kernels.cpp", source);
    write_file(folder.path() / "output.txt", text);
    folder.keep();
    return fmt::format("source and output are in {}", folder.path().string());
  } catch (const std::exception& error) {
    return fmt::format("source and output could not be saved: {}", error.what());
  }
}

}  // namespace penstock::graph
