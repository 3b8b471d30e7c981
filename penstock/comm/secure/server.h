// Accepts connections from ranks that know the job's secret, and from nobody else.
//
// One thread serves all connections and never waits for any of them, so nothing that a stranger does delays
// the rank that hosts it. A stranger gets a challenge, if it speaks the protocol at all, and no more:
//   - before the handshake is over, fewer than a hundred bytes are read from a connection;
//   - connections that have not shaken hands are few (ServerLimits::half_open) and end after a few seconds;
//     when there are too many, the oldest that has sent nothing gives way;
//   - a process without descriptors drops new connections instead of failing or spinning.
// Peers that have shaken hands are bounded in what they may send at once and in what may wait for them.
//
// Thread safety: `post`, `await_alone`, `stop` and the destructor may be called from any thread; `send` and
// `close` from the event functions and from posted functions, which all run on the server's thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "penstock/comm/secure/handshake.h"
#include "penstock/comm/secure/socket.h"

namespace penstock::comm {

struct ServerLimits {
  std::size_t half_open = 64;                 // connections that have not shaken hands
  std::chrono::milliseconds handshake{5000};  // how long one may take
  std::size_t peers = 8192;                   // connections that have
  std::size_t max_payload = std::size_t{1} << 20;
  std::size_t max_unsent = std::size_t{4} << 20;  // bytes waiting for one peer, which is then given up
  int ranks = 1 << 20;                            // a peer with a higher rank belongs to another job
};

class SecureServer {
 public:
  using Id = std::uint64_t;

  // Called on the server's thread; must be quick. An exception of `received`, such as a MismatchError for a
  // payload that makes no sense, closes the connection.
  struct Events {
    std::function<void(Id peer, int rank)> joined;
    std::function<void(Id peer, std::string_view payload)> received;
    // Not called for connections that this server closed by `close` or in its destructor.
    std::function<void(Id peer, int rank, const std::string& why)> closed;
    // Called about once a second, if it is set.
    std::function<void()> tick;
    // Called at most once, if it is set: an exception, such as one of `tick`, ends the server's thread. All
    // connections have been closed without `closed`, and nothing is served any more.
    std::function<void(const std::string& why)> failed;
  };

  // Takes a listening socket. Throws StateError if the system refuses descriptors.
  SecureServer(Socket listener, Purpose purpose, const JobKey& key, const ServerLimits& limits,
               Events events);
  // Closes everything at once; call `await_alone` before to let the peers finish.
  ~SecureServer();
  SecureServer(const SecureServer&) = delete;
  SecureServer& operator=(const SecureServer&) = delete;

  // Serves from now on. To be called once, when whatever the event functions use is there. Throws StateError
  // if the system refuses a thread.
  void start();

  // Sends a payload, now or as soon as the peer reads. Does nothing for a peer that is gone.
  void send(Id peer, std::string_view payload);
  void close(Id peer);
  std::size_t peers() const;

  // Runs a function on the server's thread; an exception of it is logged. Functions posted between `start`
  // and the destructor are run, unless the server has failed.
  void post(std::function<void()> action);

  // Waits until every peer has closed its connection, or until the deadline. Returns whether that is so.
  bool await_alone(std::chrono::steady_clock::time_point deadline);

  // Ends the server's thread, as the destructor does: no event function runs any more. For whoever reaches
  // this object from them. On the server's thread itself neither can wait for it: it then ends after the
  // function that it runs, and calls no other one.
  void stop();

 private:
  class Loop;
  std::shared_ptr<Loop> loop_;  // the thread is the other owner
};

}  // namespace penstock::comm
