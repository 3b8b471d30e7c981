// `penstock`: the commands that need no tensors run here; for the others the process becomes
// `penstock-tensor`.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

#include "penstock/cli/common/command_line.h"
#include "penstock/cli/common/failure.h"
#include "penstock/cli/plain/plain_commands.h"

namespace {

namespace fs = std::filesystem;

bool needs_tensors(std::string_view word) {
  const auto& commands = penstock::cli::tensor_commands();
  return std::any_of(commands.begin(), commands.end(),
                     [&](const auto& command) { return command.name == word; });
}

// Beside this program in a build folder, in libexec where it is installed.
int become_tensor_program(char** argv) {
  std::error_code error;
  const fs::path folder = fs::read_symlink("/proc/self/exe", error).parent_path();
  for (const fs::path& path :
       {folder / "penstock-tensor", folder.parent_path() / PENSTOCK_LIBEXEC / "penstock-tensor"})
    if (fs::exists(path, error)) {
      ::execv(path.c_str(), argv);
      penstock::cli::print_error(fmt::format("{} could not be started: {}; install Penstock again",
                                             path.string(), std::strerror(errno)));
      return penstock::cli::kFailed;
    }
  penstock::cli::print_error(
      fmt::format("penstock-tensor, which has the commands that need LibTorch, is neither in {} nor in {}; "
                  "install Penstock as a whole",
                  folder.string(), (folder.parent_path() / PENSTOCK_LIBEXEC).string()));
  return penstock::cli::kFailed;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && needs_tensors(argv[1])) return become_tensor_program(argv);
  return penstock::cli::run_command_line(argc, argv,
                                         [](CLI::App& app, penstock::cli::CommandOutcome& outcome) {
                                           penstock::cli::add_plain_commands(app, outcome);
                                           // For --help and for suggestions; they never run here.
                                           for (const auto& command : penstock::cli::tensor_commands())
                                             penstock::cli::add_tensor_subcommand(app, command.name);
                                         });
}
