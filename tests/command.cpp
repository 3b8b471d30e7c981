#include "tests/command.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace penstock::test {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

Ended run_command(const std::string& command, std::chrono::seconds limit) {
  using namespace std::chrono_literals;
  const auto begin = std::chrono::steady_clock::now();
  char path[] = "/tmp/penstock-test-XXXXXX";
  const int out = mkstemp(path);
  const pid_t child = out < 0 ? -1 : fork();
  if (child < 0) throw std::runtime_error("no temporary file or no process for: " + command);
  if (child == 0) {
    setpgid(0, 0);
    dup2(out, 1);
    dup2(out, 2);
    execl("/bin/sh", "sh", "-c", command.c_str(), static_cast<char*>(nullptr));
    _exit(127);
  }
  Ended ended;
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() - begin > limit) {
      kill(-child, SIGKILL);
      waitpid(child, &status, 0);
      ended.exit_code = Ended::kTimedOut;
      break;
    }
    std::this_thread::sleep_for(10ms);
  }
  if (ended.exit_code != Ended::kTimedOut)
    ended.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  ended.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  ended.output = text.str();
  close(out);
  unlink(path);
  return ended;
}

}  // namespace penstock::test
