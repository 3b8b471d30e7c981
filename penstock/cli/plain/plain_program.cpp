#include "penstock/cli/common/program.h"

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

namespace penstock::cli {
namespace {

namespace fs = std::filesystem;

bool needs_tensors(std::string_view word) {
  const auto& commands = tensor_commands();
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
      print_error(fmt::format("{} could not be started: {}; install Penstock again", path.string(),
                              std::strerror(errno)));
      return kFailed;
    }
  print_error(
      fmt::format("penstock-tensor, which has the commands that need LibTorch, is neither in {} nor in {}; "
                  "install Penstock as a whole",
                  folder.string(), (folder.parent_path() / PENSTOCK_LIBEXEC).string()));
  return kFailed;
}

}  // namespace

int run_plain_program(int argc, char** argv) {
  if (argc > 1 && needs_tensors(argv[1])) return become_tensor_program(argv);
  return run_command_line(argc, argv, [](CLI::App& app, CommandOutcome& outcome) {
    add_plain_commands(app, outcome);
    // For --help and for suggestions; they never run here.
    for (const auto& command : tensor_commands()) add_tensor_subcommand(app, command.name);
  });
}

}  // namespace penstock::cli
