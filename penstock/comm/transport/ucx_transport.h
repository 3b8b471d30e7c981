// Messages between processes of one host over UCX tag matching through shared memory: no sockets, no kernel
// copy for small messages, one copy for large ones. CPU memory only.
//
// The build may lack UCX; this header is the same either way. Check `ucx_available()` before constructing.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "penstock/comm/transport/transfer.h"

namespace penstock::comm {

bool ucx_available();

// Version of the loaded library, for example "1.13.1"; empty if the build has none.
std::string ucx_version();

// What arrived, as reported by the sender.
struct Arrival {
  std::uint64_t bytes = 0;
  std::uint16_t kind = 0;
};

// Failures of a transfer are thrown by `wait`:
//   MismatchError   the message is longer than the receive (names sender, tag and capacity)
//   StateError      the transport was closed during the transfer
//   CommError       UCX could not move the message (names the peer by its axis rank)
// A failed transfer counts as `done()`, so that polling callers see the exception instead of polling forever.
class UcxTransfer : public Transfer {
 public:
  // Valid only after `wait` returned Done. For a send: what was sent.
  virtual Arrival arrival() const = 0;
};

struct UcxOptions {
  // How long a wait polls before it sleeps; every event restarts the time. Default: PENSTOCK_UCX_SPIN_US,
  // else 50 us, or 5 us if `ranks_on_host` exceeds the cores this process may use (polling would then keep
  // the awaited rank from running).
  std::optional<std::chrono::microseconds> spin;
  int ranks_on_host = 0;  // 0: as many as the transport has members
};

// One UCX worker, connected to each other member.
//
// Matching: a receive takes the oldest message with its (peer, tag). `kind` is sent along and not matched;
// `arrival()` reports it together with the true size, so the layer above needs no header messages.
//
// Progress: `send` transmits a message as far as the shared memory has room; a thread of this process moves
// the rest of a larger one as the receiver makes room, even while the sender computes or waits for something
// else. Received messages are taken out of the shared memory inside calls of this class. A wait for one
// transport also serves all other transports of this process, so that no rank waits forever for a rank that
// waits elsewhere. With UCX_TLS=posix,cma,self the receiver instead fetches large messages from the sender's
// memory; see `wants_cma` for why that is not the default.
//
// Memory: a send's data and a receive's buffer belong to the transport until the transfer is done, or until
// the transport is destroyed (always the latter for a failed transfer). A receive that is dropped before it
// is done is cancelled; it may write until the transport is destroyed only if its message had already begun
// to arrive. If a send is abandoned and its memory reused, the peer may still fetch it and receive undefined
// data, so a group that abandoned a transfer must be closed as a whole.
//
// Death of a peer: sleeping waits for it end with an error at once (reported by the kernel, where the members
// share a process namespace); messages that it had sent completely can still be received. Otherwise a wait
// continues until its deadline or `interrupt`.
//
// Threads: any thread may make any call. Destroying the transport ends waits in other threads with
// StateError. UCX keeps a bookkeeping thread of its own. A forked child must not use the transport.
//
// UCX watches the process's memory mappings by patching libc. Where that causes problems (a thread
// sanitizer), UCX_MEM_EVENTS=n turns it off; this transport does not need it.
class UcxTransport {
 public:
  using Publish = std::function<void(const std::string& key, const std::string& bytes)>;
  // Blocks until the key is published, or throws if it gives up.
  using Fetch = std::function<std::string(const std::string& key)>;

  // Every member constructs it; returns when all members have published. Keys start with "ucx/": two
  // transports must not share a key space. Throws ConfigError if UCX is missing, if members use different UCX
  // versions, or if a member cannot be reached through shared memory. Exceptions of `publish` and `fetch` are
  // not caught.
  UcxTransport(int axis_rank, int size, const Publish& publish, const Fetch& fetch, UcxOptions options = {});
  ~UcxTransport();
  UcxTransport(const UcxTransport&) = delete;
  UcxTransport& operator=(const UcxTransport&) = delete;

  // Both return at once. Throw ValueError if `peer` is not another member.
  std::shared_ptr<UcxTransfer> send(const void* data, std::size_t bytes, int peer, std::uint32_t tag,
                                    std::uint16_t kind);
  std::shared_ptr<UcxTransfer> recv(void* data, std::size_t capacity, int peer, std::uint32_t tag);

  // Whether large messages are fetched from the sender's memory (see Progress).
  bool fetches_large_messages() const;

 private:
  class Core;
  class Handle;
  class Mover;
  std::shared_ptr<Core> core_;
};

}  // namespace penstock::comm
