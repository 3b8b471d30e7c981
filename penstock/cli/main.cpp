// `penstock`: one command per file of this folder.
#include <fmt/format.h>

#include <cstdio>

#include "penstock/base/errors.h"
#include "penstock/base/log.h"
#include "penstock/cli/commands.h"

int main(int argc, char** argv) {
  using namespace penstock;
  CLI::App app{"Penstock: distributed training from pure C++"};
  app.name("penstock");
  app.require_subcommand(1);
  app.set_version_flag("--version", PENSTOCK_VERSION);
  app.footer("Example: penstock launch -n 4 -- ./my_program\nExit codes: 0 ok, 1 a check failed, 2 usage or parse error.");
  cli::Outcome outcome;
  cli::add_doctor_command(app, outcome);
  cli::add_launch_command(app, outcome);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);  // prints help, version or what is wrong
    return code == 0 ? 0 : 2;
  } catch (const ConfigError& error) {
    fmt::print(stderr, "penstock: {}\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    fmt::print(stderr, "penstock: {}\n", error.what());
    return 1;
  }
  return outcome.exit_code;
}
