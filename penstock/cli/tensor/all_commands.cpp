#include "penstock/cli/common/command_line.h"
#include "penstock/cli/common/commands.h"
#include "penstock/cli/common/program.h"
#include "penstock/cli/plain/plain_commands.h"

namespace penstock::cli {

void add_all_commands(CLI::App& app, CommandOutcome& outcome) {
  add_plain_commands(app, outcome);
  add_doctor_command(app, outcome);
  add_train_command(app, outcome);
  add_resume_command(app, outcome);
  add_generate_command(app, outcome);
  add_parity_command(app, outcome);
  add_compile_command(app, outcome);
  add_inspect_command(app, outcome);
}

int run_tensor_program(int argc, char** argv) { return run_command_line(argc, argv, add_all_commands); }

}  // namespace penstock::cli
