// Shows on standard error what a command is doing, once it has taken longer than a second. On a terminal, one
// line is overwritten; elsewhere, a line is printed now and then. Prints nothing for short work.
//
//   StatusLine line("dry run");
//   line.show("reading shards", 0.25);       // "dry run: reading shards, 25 %, 3 s"
//
// A separate thread writes, so that one long call is shown, too. Thread safety: any thread may call show().
#pragma once

#include <memory>
#include <string>

namespace penstock::cli {

class StatusLine {
 public:
  explicit StatusLine(std::string what);
  // Removes the line from a terminal.
  ~StatusLine();
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;

  // Share from 0 to 1; negative if unknown.
  void show(const std::string& doing, double share);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock::cli
