#include "penstock/comm/launch/remote_shells.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "penstock/base/describe.h"
#include "penstock/base/quote.h"
#include "penstock/errors.h"

extern char** environ;

namespace penstock::comm {

std::string shell_quoted(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) {
    if (c == '\'') {
      quoted += "'\\''";
    } else {
      quoted += c;
    }
  }
  return quoted + "'";
}

std::vector<std::string> split_command(const std::string& text) {
  std::vector<std::string> words;
  bool in_word = false;
  char open = 0;
  for (const char c : text) {
    if (open != 0) {
      if (c == open) {
        open = 0;
      } else {
        words.back() += c;
      }
      continue;
    }
    if (c == ' ' || c == '\t') {
      in_word = false;
      continue;
    }
    if (!in_word) words.emplace_back();
    in_word = true;
    if (c == '\'' || c == '"') {
      open = c;
    } else {
      words.back() += c;
    }
  }
  if (open != 0)
    throw ConfigError(describe("command for other hosts", quote(text), "closed quotes", "correct --ssh"));
  return words;
}

std::string remote_script(const std::string& folder,
                          const std::vector<std::pair<std::string, std::string>>& environment,
                          const std::vector<std::string>& command) {
  std::string script;
  for (const auto& [name, value] : environment)
    script += fmt::format("export {}={}\n", name, shell_quoted(value));
  script += fmt::format(
      "cd {0} || {{ printf 'penstock: %s: there is no folder %s; start in a folder that exists on "
      "every host\\n' \"$(uname -n)\" {0} >&2; exit 127; }}\nexec",
      shell_quoted(folder));
  for (const std::string& word : command) script += " " + shell_quoted(word);
  // The rest of the standard input belongs to nobody.
  return script + " </dev/null\n";
}

RemoteShells::RemoteShells(std::vector<std::string> ssh, Terminal& terminal, OrphanGuard& guard)
    : ssh_(std::move(ssh)), terminal_(terminal), guard_(guard) {
  if (ssh_.empty())
    throw ConfigError(
        describe("command for other hosts", "nothing", "a program such as ssh", "correct --ssh"));
  const char* path = std::getenv("PATH");
  const LaunchedProgram program = find_program(ssh_.front(), path != nullptr ? path : "");
  if (program.exit_code != 0)
    throw ConfigError(
        fmt::format("{}; it starts the launchers on the other hosts: install it or choose another "
                    "with --ssh",
                    program.error));
  program_ = program.path;
}

RemoteShells::~RemoteShells() {
  for (const auto& shell : shells_) {
    if (shell->reaped) continue;
    kill(-shell->pid, SIGKILL);
    while (waitpid(shell->pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    guard_.forget(shell->pid);
  }
}

void RemoteShells::start(const std::string& host, const std::string& script) {
  std::vector<std::string> command = ssh_;
  command.insert(command.end(), {host, "sh", "-s"});
  std::vector<std::string> environment;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry)
    environment.emplace_back(*entry);
  SpawnedRank spawned = spawn_rank(program_, command, environment, guard_, &script);
  if (spawned.exec_errno != 0)
    throw ConfigError(fmt::format("launch: {} cannot be executed: {}; choose another with --ssh",
                                  quote(program_), std::strerror(spawned.exec_errno)));
  auto shell = std::make_unique<Shell>();
  shell->host = host;
  shell->pid = spawned.pid;
  shell->streams[0] = std::move(spawned.out);
  shell->streams[1] = std::move(spawned.err);
  shells_.push_back(std::move(shell));
}

void RemoteShells::add_to_poll(std::vector<pollfd>& list) const {
  for (const auto& shell : shells_)
    for (int index = 0; index < 2; ++index)
      if (shell->streams[index] && !terminal_.congested(static_cast<Terminal::Channel>(index)))
        list.push_back({shell->streams[index].get(), POLLIN, 0});
}

void RemoteShells::pump() {
  for (const auto& shell : shells_) {
    for (int index = 0; index < 2; ++index) read_stream(*shell, index);
    if (shell->reaped) continue;
    siginfo_t info = {};
    // WNOWAIT keeps the zombie, so that its process ID is not reused until the group has been killed.
    const int got = waitid(P_PID, static_cast<id_t>(shell->pid), &info, WEXITED | WNOHANG | WNOWAIT);
    if (got != 0 ? errno == EINTR : info.si_pid == 0) continue;
    shell->reaped = true;
    // What it wrote last is in the pipes; a process that it left behind may hold them open.
    for (int index = 0; index < 2; ++index) {
      read_stream(*shell, index);
      close_stream(*shell, index);
    }
    kill(-shell->pid, SIGKILL);
    while (waitpid(shell->pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    guard_.forget(shell->pid);
    ended_.push_back({shell->host, got != 0                     ? 1
                                   : info.si_code == CLD_EXITED ? info.si_status
                                                                : 128 + info.si_status});
  }
}

void RemoteShells::read_stream(Shell& shell, int index) {
  const auto channel = static_cast<Terminal::Channel>(index);
  // A pipe usually holds 64 KiB, so this ends even if others write.
  for (int reads = 0; reads < 16 && shell.streams[index] && !terminal_.congested(channel); ++reads) {
    char bytes[16 * 1024];
    const ssize_t got = read(shell.streams[index].get(), bytes, sizeof bytes);
    if (got > 0) {
      shell.lines[index].feed({bytes, static_cast<std::size_t>(got)}, [&](const LineSplitter::Line& line) {
        if (!(line.continued && line.text.empty())) terminal_.write(channel, std::string(line.text) + "\n");
      });
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      close_stream(shell, index);
    } else {
      return;
    }
  }
}

void RemoteShells::close_stream(Shell& shell, int index) {
  if (!shell.streams[index]) return;
  shell.streams[index].reset();
  shell.lines[index].finish([&](const LineSplitter::Line& line) {
    terminal_.write(static_cast<Terminal::Channel>(index), std::string(line.text) + "\n");
  });
}

std::vector<RemoteShells::EndedShell> RemoteShells::take_ended() { return std::exchange(ended_, {}); }

bool RemoteShells::all_ended() const {
  return std::all_of(shells_.begin(), shells_.end(), [](const auto& shell) { return shell->reaped; });
}

void RemoteShells::send(int signal) {
  for (const auto& shell : shells_)
    if (!shell->reaped) kill(-shell->pid, signal);
}

}  // namespace penstock::comm
