// Keeps what a Compiled has captured between runs, in the cache folder or in an artifact;
// docs/compile_cache.md describes both levels.
//
//   auto store = CallStore::open(options, function_identity, compilers);   // null if nothing is kept
//   StoredCall::Place place = store->find(guard, CallStore::Sizes::Fixed, inputs);
//   if (place.call) ...                                         // CallGuard::holds must still be asked
//   else { ... capture and compile ...; store->keep(place, call, time); }
//
// Call level (CacheOptions::identity, artifacts): from the guard of a call to the whole capture; the function
// does not run. Switched off with decompositions or wrappers of the user, which are code. Graph level: from a
// joint graph to its halves and their code. A cache never fails a run; an artifact does, with errors that
// name what is missing. Private to this folder. Thread safety: one thread at a time; several processes and
// objects may use one folder.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "penstock/compile_options.h"
#include "penstock/graph/cache/artifact_folder.h"
#include "penstock/graph/cache/directory_cache.h"
#include "penstock/graph/run/compiled_call.h"
#include "penstock/graph/run/function_capture.h"
#include "penstock/graph/run/function_identity.h"
#include "penstock/graph_compiler.h"

namespace penstock::graph {

struct StoredCall {
  PartitionedCapture capture;
  CompiledCode code;
  std::vector<SymbolValues> checked_sizes;
  std::chrono::microseconds made_in{0};  // how long capturing and compiling it took
};

class CallStore {
 public:
  enum class Sizes : std::uint8_t { Fixed, Dynamic };
  // Where a call is kept, and what was found there.
  struct Place {
    CacheKey key;
    std::optional<StoredCall> call;
    bool keeps = false;   // a call can be kept here
    std::string refused;  // why not, if this is known before it is encoded
    CacheReservation reservation;
  };

  // Throws ConfigError for a malformed PENSTOCK_CACHE_MB or PENSTOCK_TIMEOUT_S, and NotImplemented for an
  // artifact together with decompositions or wrappers of the user.
  // `passes`: PassList::text, part of all keys.
  static std::unique_ptr<CallStore> open(const CompileOptions& options, FunctionIdentity function,
                                         CompilerChoice compilers, const std::string& passes);

  // Looks up a call. An artifact that is only read throws StateError if it has no such call, or a call with
  // contexts of subclasses that this process does not have.
  Place find(const CallGuard& guard, Sizes sizes, const Values& inputs);
  // Must be called with a new capture before it is partitioned: notes whether it can be kept at all.
  void inspect(Place& place, const FunctionCapture& capture) const;
  // Keeps a call that was made in this time; with reason counted, or, in an artifact, thrown, if it has no
  // form in bytes.
  void keep(Place& place, const CompiledCall& call, std::chrono::microseconds made_in);
  // Keeps it again, after more sizes were checked.
  void keep_again(const CacheKey& key, const CompiledCall& call, std::chrono::microseconds made_in);

  // `split` of a capture, looked up by the graph. The code is that of an earlier run, or empty.
  struct Halves {
    PartitionedCapture capture;
    CompiledCode code;
    CacheKey key;
    CacheReservation reservation;
    std::chrono::steady_clock::time_point begin = {};  // of what keep_halves() notes as their time
  };
  using Split = std::function<PartitionedCapture(FunctionCapture capture)>;
  Halves halves_of(FunctionCapture capture, const Split& split);
  void keep_halves(Halves& halves, const CompiledCall& call);

  // CacheOptions::verify: throws StateError if a capture differs from a stored one.
  void verify(const PartitionedCapture& stored, const PartitionedCapture& now) const;
  // Whether nothing may be captured: an artifact that was opened.
  bool only_loads() const { return artifact_ && !artifact_->is_writable(); }
  bool verifies() const { return options_.verify; }
  CacheCounts counts() const;

 private:
  CallStore(const CompileOptions& options, FunctionIdentity function, CompilerChoice compilers,
            const std::string& passes);
  Bytes encode(const CompiledCall& call) const;
  StoredCall decode(std::span<const std::uint8_t> bytes, const Values& inputs, const std::string& name) const;
  KeyBuilder environment(const CallGuard& guard) const;
  CacheKey call_key(const CallGuard& guard, Sizes sizes) const;
  // An entry of the cache. After another process has held an entry for the longest wait, no lookup waits.
  CacheLookup look_up(const CacheKey& key, const std::string& what, bool may_wait);
  [[noreturn]] void refuse_missing(const CallGuard& guard, const Values& inputs) const;
  // Counts a call that the cache cannot keep or load, and warns.
  void refuse(const std::string& why) const;
  // For messages.
  std::string name_or(const char* otherwise) const {
    return options_.name.empty() ? std::string(otherwise) : options_.name;
  }

  CacheOptions options_;
  std::string fields_;  // of the other options that change a capture
  FunctionIdentity function_;
  CompilerChoice compilers_;
  // What keeps whole calls from being looked up: code that no identity names. Empty: nothing.
  std::string only_graphs_;
  std::optional<DirectoryCache> cache_;
  bool timed_out_ = false;              // a lookup has waited in vain
  ArtifactFolder* artifact_ = nullptr;  // owned by options_.artifact
  std::size_t artifact_hits_ = 0;
  std::chrono::microseconds artifact_time_saved_{0};
};

// ---- for keys and artifacts ----

// "penstock", "format", "libtorch", "device", "compiler".
ArtifactFolder::Fields environment_fields(const std::vector<at::Device>& devices,
                                          const GraphCompiler& compiler);

// Gives access to the folder of an artifact.
struct ArtifactAccess {
  static ArtifactFolder& folder_of(Artifact& artifact);
};

}  // namespace penstock::graph
