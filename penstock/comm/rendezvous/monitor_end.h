// The two ends of the monitor's connections.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "penstock/comm/rendezvous/monitor.h"
#include "penstock/comm/rendezvous/monitor_notice.h"
#include "penstock/comm/secure/connection.h"
#include "penstock/comm/secure/server.h"
#include "penstock/comm/transport/liveness.h"

namespace penstock::comm {

// The thread of an end is one of its owners: a listener of `liveness` should not destroy the monitor, but if
// one does, the thread still needs what it uses.
class Monitor::End {
 public:
  explicit End(const JobKey& job_key) : key(job_key) {}
  virtual ~End() = default;
  // Sends a notice of this rank to the other end. Returns when it is handed to the kernel, or after a second.
  virtual void send(const Notice& notice) = 0;
  // After the last notice: waits for the others if this is rank 0, and ends the connections.
  virtual void leave(bool failed) = 0;

  const JobKey key;
};

// When an end says that it is alive, and when its silence means that it is lost.
struct MonitorPace {
  std::chrono::milliseconds interval;
  std::chrono::milliseconds suspicion;  // after this silence errors mention it
  std::chrono::milliseconds silence;    // after this one the end is lost

  // Silence is noticed a little later than an operation that waits for it times out: the operation's error
  // says more.
  static MonitorPace of(std::chrono::milliseconds timeout);
};

// Rank 0's end: forwards what one rank says to all others.
class MonitorHub final : public Monitor::End, public std::enable_shared_from_this<MonitorHub> {
 public:
  MonitorHub(const JobKey& key, int world_size, std::shared_ptr<Liveness> liveness,
             std::chrono::milliseconds timeout);
  // To be called once.
  void start(Socket listener);
  void send(const Notice& notice) override;
  void leave(bool failed) override;

 private:
  void joined(SecureServer::Id peer, int rank);
  void received(SecureServer::Id peer, std::string_view payload);
  void closed(SecureServer::Id peer, const std::string& why);
  void tick();
  // Reports what a rank says, or what is known of it, here and to all others.
  void spread(const Notice& notice);
  // Sends a notice to all ranks but the one it is about.
  void tell_others(const Notice& notice);
  // Whether a rank is connected that is not silent. Asks the server's thread.
  bool anyone_answers();

  struct Peer {
    int rank = 0;
    Clock::time_point heard;
    bool silent = false;
    bool spoke = false;  // if not, its rank may have given this connection up and try another one
  };

  const int world_size_;
  const std::shared_ptr<Liveness> liveness_;
  const std::chrono::milliseconds timeout_;
  const MonitorPace pace_;
  // Used on the server's thread.
  std::map<SecureServer::Id, Peer> peers_;
  std::vector<Notice> spread_;  // everything so far, for ranks that join later
  Clock::time_point last_tick_ = Clock::now(), last_alive_ = Clock::now();
  std::unique_ptr<SecureServer> server_;
};

// The end of every other rank. It says at once that it is alive: rank 0 counts it only then.
class MonitorSpoke final : public Monitor::End, public std::enable_shared_from_this<MonitorSpoke> {
 public:
  MonitorSpoke(SecureConnection connection, const JobKey& key, int rank, int world_size,
               std::shared_ptr<Liveness> liveness, std::chrono::milliseconds timeout);
  ~MonitorSpoke() override;
  // To be called once, and `leave` after it.
  void start();
  void send(const Notice& notice) override;
  void leave(bool failed) override;

 private:
  bool on_own_thread() const { return std::this_thread::get_id() == thread_.get_id(); }
  void run();
  // Returns false if rank 0 is lost.
  bool exchange();
  void lost(const std::string& why);

  const int rank_;
  const int world_size_;
  const std::shared_ptr<Liveness> liveness_;
  const MonitorPace pace_;
  SecureConnection connection_;  // used on the thread
  Clock::time_point heard_ = Clock::now(), last_round_ = Clock::now(), last_alive_{};
  bool silent_ = false;
  Socket wake_;

  std::mutex mutex_;  // guards the members below
  std::condition_variable sent_;
  std::vector<Notice> queue_;
  bool stop_ = false;
  bool over_ = false;  // rank 0 is lost: nothing can be sent

  std::thread thread_;
};

}  // namespace penstock::comm
