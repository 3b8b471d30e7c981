#include "penstock/cli/common/commands.h"
#include "penstock/cli/plain/plain_commands.h"

namespace penstock::cli {

void add_all_commands(CLI::App& app, CommandOutcome& outcome) {
  add_plain_commands(app, outcome);
  add_doctor_command(app, outcome);
  add_train_command(app, outcome);
  add_resume_command(app, outcome);
  add_generate_command(app, outcome);
  add_parity_command(app, outcome);
  add_inspect_command(app, outcome);
}

}  // namespace penstock::cli
