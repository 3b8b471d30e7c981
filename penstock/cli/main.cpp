// `penstock`: the commands that need no tensors run here; for the others the process becomes
// `penstock-tensor`.
#include "penstock/cli/common/program.h"

int main(int argc, char** argv) { return penstock::cli::run_plain_program(argc, argv); }
