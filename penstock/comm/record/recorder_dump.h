// Where the recorder's dumps go, and writing one when the process is about to die.
//
// The folder is PENSTOCK_RECORDER_DIR, else the launcher's PENSTOCK_LOG_DIR; the file is recorder-rank<r>-<pid>.json, and
// a later dump of the same process replaces an earlier one.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace penstock::comm {

// Nothing when neither variable is set: fatal signals then leave no file.
std::optional<std::string> recorder_directory();

// Dumps the recorder of this process for an error that is about to be thrown, and returns a sentence for its message:
// where the dump is, or why it could not be written (which must not hide the error itself). Without a configured folder
// the dump goes to the temporary folder.
std::string dump_for_error(std::string_view reason);

enum class FatalSignals {
  Crashes,                // SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL
  CrashesAndTermination,  // and SIGTERM, SIGQUIT
};

// From now on these signals write the recorder of this process to `directory` (made if missing) and then take the course
// they would have taken: the handler that was there before runs, or the process dies of the same signal. A signal that the
// earlier handler survives is dumped once. The calling thread gets a stack of its own for handlers if it has none, so that
// even a stack overflow is recorded; other threads overflow without a dump.
//
// May be called again to change the folder or rank. Throws ConfigError when the folder cannot be made or written to.
void install_fatal_signal_dump(const std::string& directory, int rank, FatalSignals signals = FatalSignals::Crashes);

}  // namespace penstock::comm
