// The exception types of Penstock: one type per kind of failure, so that a caller can react to a kind without reading text.
//
// Every message says what happened, the actual value, the expected one and the remedy. `describe` builds such a
// message in one shape everywhere.
//
//   type                      derives from            thrown for
//   ValueError                std::invalid_argument   a bad argument value
//   ConfigError               ValueError              a bad flag, environment variable, file or text form
//   TypeError                 std::invalid_argument   a value of the wrong dynamic type
//   StateError                std::runtime_error      a call that the object's state does not allow
//   PipeliningMetadataError   std::runtime_error      tensors, messages or transfers that do not match their contract
//   CommError                 std::runtime_error      communication that failed; carries who, what and how long
//   TimeoutError              CommError               a deadline that passed
//   PeerLostError             CommError               a rank that died, failed or left
//   InvariantError            std::logic_error        a broken internal contract (checked in release builds too)
//   NotImplemented            std::logic_error        an admitted gap
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace penstock {

class ValueError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

class ConfigError : public ValueError {
 public:
  using ValueError::ValueError;
};

class TypeError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

class StateError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class PipeliningMetadataError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class InvariantError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

class NotImplemented : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// Who was doing what when communication failed. Unknown parts stay empty.
struct CommContext {
  int rank = -1;                    // global rank that reports
  std::optional<int> peer;          // global rank on the other side, for point-to-point
  std::optional<int> lost_rank;     // global rank that is gone, when known
  std::string operation;            // "all_reduce", "send", ...
  std::string group;                // name of the group
  std::string label;                // the caller's words for this transfer, "2F0 -> stage 3"
  double elapsed_s = 0;             // from the start of the operation to the failure
};

class CommError : public std::runtime_error {
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

// "what: got ACTUAL, expected EXPECTED; REMEDY". Empty parts are left out.
std::string describe(std::string_view what, std::string_view actual, std::string_view expected,
                     std::string_view remedy = {});

// Throws InvariantError naming the place. Stays on in release builds: a broken contract must never become wrong numbers.
[[noreturn]] void invariant_failed(const char* condition, const char* file, int line, std::string_view why);

}  // namespace penstock

#define PENSTOCK_INVARIANT(condition, why)                                          \
  do {                                                                              \
    if (!(condition)) [[unlikely]]                                                  \
      ::penstock::invariant_failed(#condition, __FILE__, __LINE__, (why));          \
  } while (false)
