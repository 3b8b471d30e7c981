// `penstock-tensor`: all commands. `penstock` becomes this program for those that need LibTorch.
#include "penstock/base/leave_process.h"
#include "penstock/cli/common/program.h"

int main(int argc, char** argv) { penstock::leave_process(penstock::cli::run_tensor_program(argc, argv)); }
