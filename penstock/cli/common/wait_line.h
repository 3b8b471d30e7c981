// Says on standard error what a command is doing, once it has taken longer than a second: a line that is written over on a terminal, a line now and
// then elsewhere. Nothing for work that is done at once.
//
//   WaitLine line("dry run");
//   line.show("reading shards", 0.25);       // "dry run: reading shards, 25 %, 3 s"
//
// A thread of its own writes, so that one long call shows, too. Thread rule: any thread may call show().
#pragma once

#include <memory>
#include <string>

namespace penstock::cli {

class WaitLine {
 public:
  explicit WaitLine(std::string what);
  // Removes the line from a terminal.
  ~WaitLine();
  WaitLine(const WaitLine&) = delete;
  WaitLine& operator=(const WaitLine&) = delete;

  // Share from 0 to 1; negative where it is not known.
  void show(const std::string& doing, double share);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock::cli
