// The exceptions of Penstock. All of them derive from penstock::Error; each kind of failure has its own type,
// so that a caller can react without parsing messages.
//
//   try {
//     auto world = penstock::comm::World::from_env();
//   } catch (const penstock::TimeoutError& error) {  // a rank did not join in time
//     std::cerr << error.what() << "\n";
//   } catch (const penstock::Error& error) {         // anything else that Penstock reports
//     std::cerr << error.what() << "\n";
//   }
//
// The types and what they are thrown for:
//
//   type                      derives from     thrown for
//   ValueError                Error            a bad argument value
//   ConfigError               ValueError       a bad flag, environment variable, file or text form
//   TypeError                 Error            a value of the wrong dynamic type
//   StateError                Error            a call that the object's state does not allow
//   MismatchError             Error            tensors, messages or transfers that do not match
//   PipeliningMetadataError   MismatchError    the same, between the stages of a pipeline
//   CommError                 Error            communication that failed; says who, what and after how long
//   TimeoutError              CommError        a deadline that passed
//   PeerLostError             CommError        a rank that died, failed or left
//   NotImplemented            Error            something that Penstock does not support (yet)
//   InvariantError            Error            a defect of Penstock; checked in release builds too
//
// Further types are declared next to what throws them: ScheduleError, DataDependentError, StageForwardError,
// StageBackwardError, CheckpointError, NotFiniteError. A message says what happened, the actual value, the
// expected one and what to change.
//
// Thread safety: exceptions are values; a const exception may be read by any number of threads.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace penstock {

// Base class of all exceptions that Penstock defines.
class Error : public std::runtime_error {
 public:
  // Takes the message.
  using std::runtime_error::runtime_error;
};

// A bad argument value.
class ValueError : public Error {
 public:
  // Takes the message.
  using Error::Error;
};

// A bad flag, environment variable, file or text form.
class ConfigError : public ValueError {
 public:
  // Takes the message.
  using ValueError::ValueError;
};

// A value of the wrong dynamic type.
class TypeError : public Error {
 public:
  // Takes the message.
  using Error::Error;
};

// A call that the object's current state does not allow.
class StateError : public Error {
 public:
  // Takes the message.
  using Error::Error;
};

// Tensors, messages or transfers that differ from what both sides agreed on.
class MismatchError : public Error {
 public:
  // Takes the message.
  using Error::Error;
};

// A mismatch between the stages of a pipeline.
class PipeliningMetadataError : public MismatchError {
 public:
  // Takes the message.
  using MismatchError::MismatchError;
};

// A defect of Penstock itself. Checked in release builds too; please report it.
class InvariantError : public Error {
 public:
  // Takes the message.
  using Error::Error;
};

// Something that Penstock does not support (yet).
class NotImplemented : public Error {
 public:
  // Takes the message.
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
  double elapsed_s = 0;          // seconds from the start of the operation to the failure
};

// Communication that failed. The message ends with the context in brackets, unless nothing of it is known.
class CommError : public Error {
 public:
  // `what_happened` is the message without the context.
  CommError(const std::string& what_happened, CommContext context);
  // Who was doing what.
  const CommContext& context() const { return context_; }

 private:
  CommContext context_;
};

// A deadline of a communication that passed.
class TimeoutError : public CommError {
 public:
  // Takes the message and the context.
  using CommError::CommError;
};

// A rank that died, failed or left.
class PeerLostError : public CommError {
 public:
  // Takes the message and the context.
  using CommError::CommError;
};

}  // namespace penstock
