// Messages between processes of one host over UCX tag matching: shared memory, no sockets, no copy through the kernel
// for small messages and one copy for large ones. CPU memory only.
//
// The build may lack UCX; this header is the same either way. Ask `ucx_available()` before constructing.
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

// "1.13.1", of the library in use; empty when the build has none.
std::string ucx_version();

// What really arrived, as the sender said it.
struct Arrival {
  std::uint64_t bytes = 0;
  std::uint16_t kind = 0;
};

// Failures of a transfer are thrown by `wait`:
//   PipeliningMetadataError   the message is longer than the receive (names sender, tag and capacity)
//   StateError                the transport was closed under the transfer
//   std::runtime_error        UCX could not move the message (names the peer)
// A failed transfer counts as `done()`, so that polling callers meet the exception instead of polling for ever.
class UcxTransfer : public Transfer {
 public:
  // Only after `wait` returned Done. For a send: what was sent.
  virtual Arrival arrival() const = 0;
};

struct UcxOptions {
  // How long a wait polls before it sleeps; every event starts the time anew. When not given: PENSTOCK_UCX_SPIN_US, else
  // 50 us, or 5 us when `ranks_on_host` is more than the cores this process may use (polling would then keep the
  // very rank from running that is waited for).
  std::optional<std::chrono::microseconds> spin;
  int ranks_on_host = 0;  // 0: as many as the transport has members
};

// One UCX worker, with a way to each other member.
//
// Matching: a receive takes the oldest message with its (peer, tag). `kind` travels beside them and is not matched;
// `arrival()` reports it together with the true size, so the layer above needs no header messages.
//
// Progress: a message leaves with `send` as far as the shared memory has room; the rest of a larger one is moved by a thread of
// this process as the receiver makes room, also while the sender computes or waits for something else. Received messages are
// taken out of the shared memory inside calls of this class; a wait for one transport takes those of all others of this process,
// too, so that nobody waits for ever for a rank that waits elsewhere. With UCX_TLS=posix,cma,self large messages are fetched by the
// receiver out of the sender's memory instead; see `wants_cma` for why that is not the default.
//
// Memory: a send's data and a receive's buffer belong to the transport until the transfer is done, or until the
// transport is destroyed (a failed transfer: always until then). A receive that is dropped before it is done is cancelled, and may write until the transport
// is destroyed only if its message had already begun to arrive. After a send was given up and its memory reused, the
// peer could still fetch it: what the peer receives is then undefined, so a group that gave up a transfer must be closed
// as a whole.
//
// Death of a peer: ends sleeping waits for it with an error at once (the kernel tells, where the members share a process
// namespace); what it had sent completely can still be received. Otherwise a wait goes on until its deadline or `interrupt`.
//
// Threads: all calls may come from any thread. Destroying the transport ends waits in other threads with StateError.
// UCX keeps a thread of its own for bookkeeping. A forked child must not use the transport.
//
// UCX watches the process's memory mappings by patching libc; where that disturbs (a thread sanitizer), UCX_MEM_EVENTS=n
// turns it off, and this transport does not need it.
class UcxTransport {
 public:
  using Publish = std::function<void(const std::string& key, const std::string& bytes)>;
  // Blocks until the key was published, or throws when it gives up.
  using Fetch = std::function<std::string(const std::string& key)>;

  // Every member constructs it; returns when all members have published. Keys start with "ucx/": two transports must not
  // share a key space. Throws ConfigError when UCX is missing, when members use different UCX versions, or when a member
  // cannot be reached through shared memory; what `publish` and `fetch` throw passes through.
  UcxTransport(int axis_rank, int size, const Publish& publish, const Fetch& fetch, UcxOptions options = {});
  ~UcxTransport();
  UcxTransport(const UcxTransport&) = delete;
  UcxTransport& operator=(const UcxTransport&) = delete;

  // Both return at once. Throw ValueError when `peer` is no other member.
  std::shared_ptr<UcxTransfer> send(const void* data, std::size_t bytes, int peer, std::uint32_t tag, std::uint16_t kind);
  std::shared_ptr<UcxTransfer> recv(void* data, std::size_t capacity, int peer, std::uint32_t tag);

  // Large messages are fetched out of the sender's memory (see Progress).
  bool fetches_large_messages() const;

 private:
  class Core;
  class Handle;
  class Mover;
  std::shared_ptr<Core> core_;
};

}  // namespace penstock::comm
