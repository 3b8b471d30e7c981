// The exceptions of Penstock. All of them derive from penstock::Error; a type of its own for each kind of failure lets a
// caller react without reading text.
//
//   try {
//     auto world = penstock::comm::World::from_env();
//   } catch (const penstock::TimeoutError& error) {      // a rank did not come
//     std::cerr << error.what() << "\n";
//   } catch (const penstock::Error& error) {             // anything else that Penstock reports
//     std::cerr << error.what() << "\n";
//   }
//
//   type                      derives from     thrown for
//   ValueError                Error            a bad argument value
//   ConfigError               ValueError       a bad flag, environment variable, file or text form
//   TypeError                 Error            a value of the wrong dynamic type
//   StateError                Error            a call that the object's state does not allow
//   MismatchError             Error            tensors, messages or transfers that do not match what both sides agreed on
//   PipeliningMetadataError   MismatchError    the same, between the stages of a pipeline
//   CommError                 Error            communication that failed; says who, what and after how long
//   TimeoutError              CommError        a deadline that passed
//   PeerLostError             CommError        a rank that died, failed or left
//   NotImplemented            Error            something that Penstock does not support (yet)
//   InvariantError            Error            a defect of Penstock; checked in release builds too
//
// Further types are declared next to what throws them: ScheduleError, DataDependentError, StageForwardError,
// StageBackwardError, CheckpointError, NotFiniteError. Every message says what happened, the actual value, the expected one
// and the remedy.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace penstock {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class ValueError : public Error {
 public:
  using Error::Error;
};

class ConfigError : public ValueError {
 public:
  using ValueError::ValueError;
};

class TypeError : public Error {
 public:
  using Error::Error;
};

class StateError : public Error {
 public:
  using Error::Error;
};

class MismatchError : public Error {
 public:
  using Error::Error;
};

class PipeliningMetadataError : public MismatchError {
 public:
  using MismatchError::MismatchError;
};

class InvariantError : public Error {
 public:
  using Error::Error;
};

class NotImplemented : public Error {
 public:
  using Error::Error;
};

// Who was doing what when communication failed. Unknown parts are left empty.
struct CommContext {
  int rank = -1;                 // global rank that reports
  std::optional<int> peer;       // global rank on the other side, for point-to-point transfers
  std::optional<int> lost_rank;  // global rank that is gone, when known
  std::string operation;         // "all_reduce", "send", ...
  std::string group;             // name of the group
  std::string label;             // the caller's label of this transfer, "2F0 -> stage 3"
  double elapsed_s = 0;          // from the start of the operation to the failure
};

class CommError : public Error {
 public:
  CommError(const std::string& what_happened, CommContext context);
  const CommContext& context() const { return context_; }

 private:
  CommContext context_;
};

class TimeoutError : public CommError {
 public:
  using CommError::CommError;
};

class PeerLostError : public CommError {
 public:
  using CommError::CommError;
};

}  // namespace penstock
