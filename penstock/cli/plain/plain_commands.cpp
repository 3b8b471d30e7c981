#include "penstock/cli/plain/plain_commands.h"

namespace penstock::cli {

namespace {

// Newer versions of CLI11 fill the lines of footers anew, which would spoil examples and tables.
template <class Formatter>
void keep_lines(Formatter& formatter) {
  if constexpr (requires { formatter.enable_footer_formatting(false); })
    formatter.enable_footer_formatting(false);
}

}  // namespace

void add_plain_commands(CLI::App& app, CommandOutcome& outcome) {
  keep_lines(*app.get_formatter());  // the commands share it
  add_launch_command(app, outcome);
  add_schedule_command(app, outcome);
  add_check_command(app, outcome);
  add_simulate_command(app, outcome);
  add_compare_command(app, outcome);
  add_partition_command(app, outcome);
  add_trace_command(app, outcome);
  add_data_command(app, outcome);
  add_report_command(app, outcome);
}

}  // namespace penstock::cli
