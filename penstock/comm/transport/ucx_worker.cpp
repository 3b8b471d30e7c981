#include "penstock/comm/transport/ucx_worker.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucs/config/global_opts.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <random>

#include "penstock/base/describe.h"
#include "penstock/base/env.h"
#include "penstock/base/log.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

constexpr auto kCloseTime = std::chrono::milliseconds(200);

void check(ucs_status_t status, const std::string& what, const char* remedy) {
  if (status != UCS_OK)
    throw ConfigError(fmt::format("UCX transport: {}: {}; {}", what, ucs_status_string(status), remedy));
}

// What a member publishes to the others. Only processes of the same host and the same UCX read it, so plain
// bytes suffice.
struct Record {
  std::uint64_t magic = 0;
  std::uint64_t probe_address = 0;
  std::uint64_t probe_value = 0;
  std::int64_t pid = 0;
  std::uint64_t pid_namespace = 0;  // process ids are comparable if this is equal
  std::uint32_t ucx_major = 0;
  std::uint32_t ucx_minor = 0;
  // followed by the worker's address
};
constexpr std::uint64_t kMagic = 0x3158435550u;  // "PUCX1"

std::string key_of(const char* what, int axis_rank) { return fmt::format("ucx/{}/{}", what, axis_rank); }

Record split(const std::string& bytes, int peer, std::string& address) {
  Record record;
  if (bytes.size() > sizeof record) {
    std::memcpy(&record, bytes.data(), sizeof record);
    address = bytes.substr(sizeof record);
  }
  if (record.magic != kMagic)
    throw ConfigError(
        describe(fmt::format("UCX transport: record published by axis rank {}", peer),
                 fmt::format("{} bytes of another format", bytes.size()), "a UCX worker address",
                 "give every transport its own key space and start every rank from the same build"));
  unsigned major = 0, minor = 0, release = 0;
  ucp_get_version(&major, &minor, &release);
  if (record.ucx_major != major || record.ucx_minor != minor)
    throw ConfigError(describe(fmt::format("UCX transport: version of axis rank {}", peer),
                               fmt::format("{}.{}", record.ucx_major, record.ucx_minor),
                               fmt::format("{}.{}", major, minor),
                               "start every rank with the same UCX library"));
  return record;
}

// Returns whether this process may read the peer's memory. Tries it instead of checking: permissions,
// namespaces and security modules each have their own rules. UCX checks only some of them and fails the
// message later.
bool can_read(const Record& record) {
  std::uint64_t value = 0;
  iovec local{&value, sizeof value};
  iovec remote{reinterpret_cast<void*>(record.probe_address), sizeof value};
  const ssize_t got = process_vm_readv(static_cast<pid_t>(record.pid), &local, 1, &remote, 1, 0);
  return got == static_cast<ssize_t>(sizeof value) && value == record.probe_value;
}

std::uint64_t own_pid_namespace() {
  struct stat place {};
  return stat("/proc/self/ns/pid", &place) == 0 ? place.st_ino : 0;
}

// UCX itself can watch shared-memory peers, but not together with CMA, only with a delay of seconds, and in
// 1.13 not while a send waits for its answer. The kernel reports a death at once.
int watch_process(const Record& record) {
  if (record.pid_namespace == 0 || record.pid_namespace != own_pid_namespace()) return -1;
  const auto fd = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(record.pid), 0u));
  if (fd < 0) log().debug("UCX transport: cannot watch process {}: {}", record.pid, std::strerror(errno));
  return fd;
}

// Limits UCX's own log to errors: its warnings are about devices that this transport does not use.
void quiet_ucx() {
  const std::string level =
      env_choice("PENSTOCK_LOG", {"trace", "debug", "info", "warn", "error", "off"}, "info");
  if (env_text("UCX_LOG_LEVEL") || level == "debug" || level == "trace") return;
  check(ucs_global_opts_set_value("LOG_LEVEL", "error"), "setting the log level of UCX",
        "set UCX_LOG_LEVEL yourself");
}

// Only if the user chose it with UCX_TLS: on UCX 1.13 a peer that dies while its memory is read also ends the
// reading process, and a receiver that does something else right after its last fetch can keep the sender
// waiting. Transfer in pieces has neither problem and is as fast up to a megabyte.
bool wants_cma() {
  const auto transports = env_text("UCX_TLS");
  if (!transports) return false;
  if (transports->starts_with('^')) return transports->find("cma") == std::string::npos;
  for (const char* name : {"cma", "all", "sm", "shm"})
    if (fmt::format(",{},", *transports).find(fmt::format(",{},", name)) != std::string::npos) return true;
  return false;
}

class Config {
 public:
  Config() {
    check(ucp_config_read(nullptr, nullptr, &config_), "reading the UCX_* environment variables",
          "unset or correct them");
  }
  ~Config() { ucp_config_release(config_); }
  Config(const Config&) = delete;
  Config& operator=(const Config&) = delete;

  // The user's environment takes precedence.
  void set_default(const char* name, const char* value) {
    if (env_text(fmt::format("UCX_{}", name).c_str())) return;
    check(ucp_config_modify(config_, name, value), fmt::format("setting {}={}", name, value),
          "set UCX_TLS to override this default");
  }
  const ucp_config_t* get() const { return config_; }

 private:
  ucp_config_t* config_ = nullptr;
};

}  // namespace

UcxWorker::UcxWorker(int axis_rank, int size, const UcxTransport::Publish& publish,
                     const UcxTransport::Fetch& fetch)
    : axis_rank_(axis_rank), peers_(static_cast<std::size_t>(size)) {
  quiet_ucx();
  try {
    // First with CMA (the receiver reads the sender's memory). UCX gets the permission it needs from the Yama
    // security module when a context opens, so the probe comes after that; all members must agree on one
    // method.
    const std::uint64_t probe = std::random_device{}() | (static_cast<std::uint64_t>(axis_rank) << 32);
    bool readable = wants_cma();
    open(readable, size);
    publish(key_of("address", axis_rank), own_record(reinterpret_cast<std::uint64_t>(&probe), probe));
    std::vector<std::string> addresses(peers_.size());
    for (int peer = 0; peer < size; ++peer) {
      if (peer == axis_rank) continue;
      auto& address = addresses[static_cast<std::size_t>(peer)];
      const Record record = split(fetch(key_of("address", peer)), peer, address);
      readable = can_read(record) && readable;
      peers_[static_cast<std::size_t>(peer)].process_fd = watch_process(record);
    }
    publish(key_of("readable", axis_rank), readable ? "1" : "0");
    // `probe` must stay in place until every verdict is known.
    for (int peer = 0; peer < size; ++peer)
      if (peer != axis_rank) readable = fetch(key_of("readable", peer)) == "1" && readable;
    if (!readable) {
      log().debug(
          "UCX transport: the kernel does not let members read each other's memory; large messages are sent "
          "in pieces");
      shut();
      open(false, size);
      publish(key_of("address2", axis_rank), own_record(0, 0));
      for (int peer = 0; peer < size; ++peer)
        if (peer != axis_rank)
          split(fetch(key_of("address2", peer)), peer, addresses[static_cast<std::size_t>(peer)]);
    }
    for (int peer = 0; peer < size; ++peer)
      if (peer != axis_rank) connect(peer, addresses[static_cast<std::size_t>(peer)]);
  } catch (...) {
    for (const Peer& peer : peers_)
      if (peer.process_fd >= 0) ::close(peer.process_fd);
    shut();
    throw;
  }
}

UcxWorker::~UcxWorker() {
  close(false);
  for (const Peer& peer : peers_)
    if (peer.process_fd >= 0) ::close(peer.process_fd);
}

void UcxWorker::open(bool use_cma, int size) {
  Config config;
  // Measurements: two processes, UCX 1.13.1, half a round trip, medians on a busy 2-core virtual machine.
  //
  // posix: as fast as sysv (4 B in 0.3 us both), and leaves nothing behind when a process dies. Without tcp
  // and the network devices, opening is fast and an unreachable member is an error at once instead of a slow
  // path.
  config.set_default("TLS", use_cma ? "posix,cma,self" : "posix,self");
  if (use_cma) {
    // From this size on the receiver reads the sender's memory. Below it, pieces through shared memory are
    // faster (16 KiB: 3.6 us against 5.9); at 64 KiB both take 10 us on 4 KiB pages, and on huge pages
    // reading takes 7. Reading also lets the sender compute meanwhile and keeps early messages out of the
    // receiver's heap, which is worth more than the quarter of the time that pieces would save on 8 MiB
    // between two otherwise idle cores.
    config.set_default("RNDV_THRESH", "64k");
    // The receiver reads; the sender never writes, so an abandoned receive cannot be written to from outside.
    config.set_default("RNDV_SCHEME", "get_zcopy");
  } else {
    // Without CMA a rendezvous saves nothing but the receiver's heap: 64 KiB take 10 us without it and 11-15
    // with it.
    config.set_default("RNDV_THRESH", "256k");
  }

  ucp_params_t params{};
  params.field_mask =
      UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  params.features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP;
  params.estimated_num_eps = static_cast<std::size_t>(size);
  check(ucp_init(&params, config.get(), &context_), "opening a context",
        "check the UCX_* environment variables and that /dev/shm is writable");

  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  // The transport's mutex serializes (UCX's own locking costs the same, and completions need the mutex
  // anyway).
  worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  check(ucp_worker_create(context_, &worker, &worker_), "creating a worker", "check that /dev/shm has room");
  check(ucp_worker_get_efd(worker_, &event_fd_), "getting the event descriptor", "leave UCX_TLS unset");
  uses_cma_ = use_cma;
}

std::string UcxWorker::own_record(std::uint64_t probe_address, std::uint64_t probe_value) const {
  Record record;
  unsigned release = 0;
  ucp_get_version(&record.ucx_major, &record.ucx_minor, &release);
  record.magic = kMagic;
  record.probe_address = probe_address;
  record.probe_value = probe_value;
  record.pid = getpid();
  record.pid_namespace = own_pid_namespace();
  ucp_address_t* address = nullptr;
  std::size_t length = 0;
  check(ucp_worker_get_address(worker_, &address, &length), "getting the worker's address",
        "leave UCX_TLS unset");
  std::string bytes(reinterpret_cast<const char*>(&record), sizeof record);
  bytes.append(reinterpret_cast<const char*>(address), length);
  ucp_worker_release_address(worker_, address);
  return bytes;
}

void UcxWorker::connect(int peer, const std::string& address) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  check(ucp_ep_create(worker_, &params, &peers_[static_cast<std::size_t>(peer)].endpoint),
        fmt::format("connecting axis rank {} to axis rank {}", axis_rank_, peer),
        "members must be processes of one host that share /dev/shm; use another transport across hosts");
}

void UcxWorker::close(bool requests_left) noexcept {
  if (worker_ == nullptr) return;
  bool all_closed = !requests_left;
  if (!requests_left) {
    const auto deadline = Clock::now() + kCloseTime;
    for (Peer& peer : peers_) {
      if (peer.endpoint == nullptr) continue;
      ucp_request_param_t params{};
      // Data handed over (including acknowledgements) first reaches the peer's queue, if the peer is alive to
      // drain it.
      void* request = ucp_ep_close_nbx(peer.endpoint, &params);
      peer.endpoint = nullptr;
      if (!UCS_PTR_IS_PTR(request)) continue;
      while (ucp_request_check_status(request) == UCS_INPROGRESS && Clock::now() < deadline)
        ucp_worker_progress(worker_);
      if (ucp_request_check_status(request) == UCS_INPROGRESS) all_closed = false;
      ucp_request_free(request);
    }
  }
  if (all_closed) {
    shut();
    return;
  }
  // Leaked on purpose. A request that neither completes nor cancels still points into memory that the caller
  // is about to free, and destroying a worker may touch its requests. A worker that nobody calls never moves
  // a byte (the receiver does all reading, inside progress calls), so leaking it is safe; a dead peer is the
  // usual cause.
  worker_ = nullptr;
  context_ = nullptr;
}

void UcxWorker::shut() noexcept {
  if (worker_ != nullptr) ucp_worker_destroy(worker_);
  if (context_ != nullptr) ucp_cleanup(context_);
  worker_ = nullptr;
  context_ = nullptr;
  event_fd_ = -1;
}

}  // namespace penstock::comm
