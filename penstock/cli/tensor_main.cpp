// `penstock-tensor`: all commands. `penstock` becomes this program for those that need LibTorch.
#include "penstock/cli/common/command_line.h"

int main(int argc, char** argv) {
  return penstock::cli::run_command_line(argc, argv, penstock::cli::add_all_commands);
}
