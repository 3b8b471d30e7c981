// The location of recorder dumps, and writing a dump when the process is about to die.
//
// The folder is PENSTOCK_RECORDER_DIR, else the launcher's PENSTOCK_LOG_DIR. The file is
// recorder-rank<r>-<pid>.json; a later dump of the same process replaces an earlier one.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace penstock::comm {

// Returns std::nullopt if neither variable is set; fatal signals then leave no file.
std::optional<std::string> recorder_directory();

// Dumps the recorder of this process for an error that is about to be thrown, and returns a sentence for its
// message: where the dump is, or why it could not be written (a failed dump must not hide the error itself).
// Without a configured folder the dump is written to the temporary folder.
std::string dump_for_error(std::string_view reason);

enum class FatalSignals {
  Crashes,                // SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL
  CrashesAndTermination,  // and SIGTERM, SIGQUIT
};

// Installs handlers that write the recorder of this process to `directory` (created if missing) and then let
// the signal take its previous course: the previous handler runs, or the process dies of the same signal. If
// the previous handler returns, the signal is dumped only once. The calling thread gets an alternate signal
// stack if it has none, so that even a stack overflow is recorded; stack overflows of other threads leave no
// dump.
//
// May be called again to change the folder or rank. Throws ConfigError if the folder cannot be created or
// written to.
void install_fatal_signal_dump(const std::string& directory, int rank,
                               FatalSignals signals = FatalSignals::Crashes);

}  // namespace penstock::comm
