// Starts the launchers of the other hosts over ssh, or another command with its form of arguments, and shows
// what they print.
//
// Each runs `SSH... HOST sh -s` and reads a script from its standard input, so that neither the secret nor
// the environment is visible in the list of processes of either host.
#pragma once

#include <poll.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/comm/launch/launch_output.h"
#include "penstock/comm/launch/launch_process.h"

namespace penstock::comm {

// The text between quotes of a shell: 'it'\''s'.
std::string shell_quoted(const std::string& text);

// Splits a command at blanks; quotes of either kind keep blanks together. Throws ConfigError for an unclosed
// one.
std::vector<std::string> split_command(const std::string& text);

// The script that starts `command` in `folder` with these variables. It ends with the exit code of the
// command, or 127 with a message if the folder does not exist there.
std::string remote_script(const std::string& folder,
                          const std::vector<std::pair<std::string, std::string>>& environment,
                          const std::vector<std::string>& command);

class RemoteShells {
 public:
  // Throws ConfigError if the first word of `ssh` is not a program.
  RemoteShells(std::vector<std::string> ssh, Terminal& terminal, OrphanGuard& guard);
  ~RemoteShells();  // kills what is left
  RemoteShells(const RemoteShells&) = delete;
  RemoteShells& operator=(const RemoteShells&) = delete;

  void start(const std::string& host, const std::string& script);

  void add_to_poll(std::vector<pollfd>& list) const;
  // Shows output and notices ends.
  void pump();

  struct EndedShell {
    std::string host;
    int code = 0;  // as a shell reports it
  };
  // Returns those that ended since the last call.
  std::vector<EndedShell> take_ended();
  bool all_ended() const;
  void send(int signal);

 private:
  struct Shell {
    std::string host;
    pid_t pid = -1;
    Fd streams[2];
    LineSplitter lines[2] = {LineSplitter(kMaxShownShellLine), LineSplitter(kMaxShownShellLine)};
    bool reaped = false;
  };
  static constexpr std::size_t kMaxShownShellLine = 64 * 1024;

  void read_stream(Shell& shell, int index);
  void close_stream(Shell& shell, int index);

  std::vector<std::string> ssh_;
  std::string program_;
  Terminal& terminal_;
  OrphanGuard& guard_;
  std::vector<std::unique_ptr<Shell>> shells_;
  std::vector<EndedShell> ended_;
};

}  // namespace penstock::comm
