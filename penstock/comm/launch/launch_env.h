// The launcher's settings for this process: its rank, and where the ranks meet.
//
// Supported, in this order: Penstock's launcher and torchrun (the same variable names), Open MPI, Slurm; else
// one rank. A pure conversion of text to values without communication, so every rule can be tested without
// starting anything.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace penstock::comm {

// Where ranks meet before they can communicate: a TCP store that one process hosts, or a file that all can
// access.
struct Rendezvous {
  enum class Kind { None, Tcp, File };
  Kind kind = Kind::None;
  std::string host;             // Tcp
  int port = 0;                 // Tcp
  std::string path;             // File
  bool hosted_by_rank0 = true;  // Tcp: false if the launcher hosts the store (as torchrun's agent does)
  std::string prefix;           // prefix of all keys; differs between restarts that share a store

  std::string describe() const;
  // Whether all ranks must be on this host. Sockets then listen on loopback only.
  bool loopback_only() const;
};

struct LaunchEnv {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  // Whether the launcher said which ranks are on this host. If not, the two numbers above assume one host,
  // and the world corrects them when the ranks have met.
  bool knows_local = true;
  Rendezvous rendezvous;
  std::string secret;   // PENSTOCK_SECRET; empty: not set
  std::string job;      // what the launcher calls this job; the same on all ranks, empty if it does not say
  std::string notices;  // PENSTOCK_LAUNCH_NOTICES: where the launcher says which ranks have ended
  std::string launcher = "none";  // "penstock or torchrun", "Open MPI", "Slurm", "none"
};

// Reads the variables through `get` (nullopt: not set). Throws a ConfigError that names the variable, its
// value and what to set instead: a rank without a size, a rank outside the world, several hosts without
// MASTER_ADDR, ...
//
// PENSTOCK_RENDEZVOUS (tcp://host:port or file:///path) overrides where ranks meet under every launcher.
LaunchEnv parse_launch_env(const std::function<std::optional<std::string>(const char*)>& get);

// Returns the secret by which ranks recognize each other. Without PENSTOCK_SECRET it is derived from the
// job's port, size and name, which are the same on all its ranks: that keeps out other jobs and programs that
// speak another protocol, and nobody who wants to get in.
std::string rendezvous_secret(const LaunchEnv& env);

// Reads the environment of this process.
LaunchEnv launch_env();

// Returns the address on which the process that hosts the store, or the monitor, listens: that of the master
// if it is one of this host's, loopback if all ranks are on this host, and "" for all interfaces only if this
// host cannot tell by which address the others know it.
std::string listen_address(const LaunchEnv& env);

// Returns the first host of a Slurm node list: "gpu[03-05,9],login1" returns "gpu03".
std::string first_slurm_host(const std::string& node_list);

}  // namespace penstock::comm
