#include "penstock/cli/commands.h"

namespace penstock::cli {

void add_all_commands(CLI::App& app, Outcome& outcome) {
  add_doctor_command(app, outcome);
  add_launch_command(app, outcome);
  add_schedule_command(app, outcome);
  add_check_command(app, outcome);
  add_simulate_command(app, outcome);
  add_compare_command(app, outcome);
  add_trace_command(app, outcome);
  add_data_command(app, outcome);
  add_train_command(app, outcome);
  add_resume_command(app, outcome);
  add_generate_command(app, outcome);
  add_report_command(app, outcome);
  add_parity_command(app, outcome);
  add_inspect_command(app, outcome);
}

}  // namespace penstock::cli
