// A UCX worker connected to every other member of a transport. Internal to ucx_transport.cpp: setup, defaults
// and teardown are here, messages there.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/comm/transport/ucx_transport.h"

namespace penstock::comm {

// Thread safety: none; the transport's mutex guards every use.
class UcxWorker {
 public:
  UcxWorker(int axis_rank, int size, const UcxTransport::Publish& publish, const UcxTransport::Fetch& fetch);
  // Takes bounded time: what does not close in time is leaked (see `close`).
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  ucp_worker_h get() const { return worker_; }
  ucp_ep_h endpoint(int peer) const { return peers_[static_cast<std::size_t>(peer)].endpoint; }
  // Readable when an armed worker has work to do.
  int event_fd() const { return event_fd_; }
  bool uses_cma() const { return uses_cma_; }

  // Readable when the peer's process has ended, reaped or not; -1 if the kernel cannot tell.
  int process_fd(int peer) const { return peers_[static_cast<std::size_t>(peer)].process_fd; }
  bool is_lost(int peer) const { return peers_[static_cast<std::size_t>(peer)].lost; }
  void set_lost(int peer) { peers_[static_cast<std::size_t>(peer)].lost = true; }

  // Closes the endpoints, then the worker. `requests_left`: a request could not be cancelled.
  void close(bool requests_left) noexcept;

 private:
  struct Peer {
    ucp_ep_h endpoint = nullptr;
    int process_fd = -1;
    bool lost = false;
  };

  void open(bool use_cma, int size);
  std::string own_record(std::uint64_t probe_address, std::uint64_t probe_value) const;
  void connect(int peer, const std::string& address);
  void shut() noexcept;

  int axis_rank_ = 0;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
  bool uses_cma_ = false;
  std::vector<Peer> peers_;  // by axis rank; the own entry stays empty
};

}  // namespace penstock::comm
