// `penstock launch` as a program of its own: the launcher as its tests see it, from outside and without
// LibTorch.
#include <signal.h>

#include <cstdio>
#include <exception>

#include "penstock/base/errors.h"
#include "penstock/cli/commands.h"

int main(int argc, char** argv) {
  // A test run may itself be in the background of a shell that ignores these; the tests send them.
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) ::signal(signal, SIG_DFL);
  CLI::App app("test driver of the launcher");
  penstock::cli::Outcome outcome;
  penstock::cli::add_launch_command(app, outcome);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const penstock::ConfigError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return outcome.exit_code;
}
