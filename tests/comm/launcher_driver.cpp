// `penstock launch` as a separate program: the launcher as its tests see it, from outside and without
// LibTorch.
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "penstock/cli/common/commands.h"
#include "penstock/comm/launch/compute_environment.h"
#include "penstock/errors.h"

int main(int argc, char** argv) {
  // A test run may itself be in the background of a shell that ignores these signals; the tests send them.
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) ::signal(signal, SIG_DFL);
  CLI::App app("test driver of the launcher");
  penstock::cli::CommandOutcome outcome;
  penstock::cli::add_launch_command(app, outcome);
  // A rank that another launcher started with three more on this host: prints its environment after its
  // restart.
  CLI::App* rank = app.add_subcommand("rank");
  std::vector<std::string> words;
  rank->add_option("words", words);
  rank->callback([&] {
    penstock::comm::restart_with_compute_environment(4);
    for (const std::string& word : words) std::printf("<%s>", word.c_str());
    for (const char* name : {"OMP_NUM_THREADS", "GOMP_SPINCOUNT"})
      std::printf(" %s=%s", name, std::getenv(name));
    std::printf("\n");
  });
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
