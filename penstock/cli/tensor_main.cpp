// `penstock-tensor`: all commands. `penstock` becomes this program for those that need LibTorch.
#include "penstock/cli/common/program.h"

int main(int argc, char** argv) { return penstock::cli::run_tensor_program(argc, argv); }
