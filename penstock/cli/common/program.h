// The programs of the command line as functions: `main` calls one of them and needs no other header.
#pragma once

namespace penstock::cli {

// `penstock`: runs the commands that need no tensors; for the others the process becomes penstock-tensor.
int run_plain_program(int argc, char** argv);

// `penstock-tensor`: runs all commands.
int run_tensor_program(int argc, char** argv);

}  // namespace penstock::cli
