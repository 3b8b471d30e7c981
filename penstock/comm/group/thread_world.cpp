// A thread world: every rank is a thread of this process; they share one in-process store and one Liveness.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "penstock/base/describe.h"
#include "penstock/comm/group/operators.h"
#include "penstock/comm/group/work_state.h"
#include "penstock/errors.h"
#include "penstock/world.h"

namespace penstock::comm {
namespace {

// On x86 LibTorch uses MKL for tanh and similar functions. MKL's vector functions initialize themselves on
// their first call; if two threads make that call at once, results may have only half of the digits (observed
// with LibTorch 2.11). So one thread makes it for all.
void prepare_vector_functions() {
  static const bool prepared = at::tanh(at::ones({32})).defined();
  static_cast<void>(prepared);
}

}  // namespace

void run_ranks(int size, std::chrono::milliseconds timeout, const std::function<void(World&)>& body) {
  if (size < 1) throw ValueError(describe("run_ranks: size", fmt::format("{}", size), "at least 1"));
  register_operators();
  prepare_vector_functions();
  static std::atomic<int> worlds{0};
  const int world_number = worlds++;
  const auto deadline = Clock::now() + timeout;
  const Store store = Store::in_process();
  const auto liveness = std::make_shared<Liveness>(size);

  std::mutex mutex;
  std::condition_variable ended;
  std::exception_ptr first_error;
  bool first_is_consequence = false;
  // A rank may learn of another's failure before that rank has left its own call: the cause replaces the loss
  // of a peer.
  const auto note = [&](const std::exception& error) {
    const std::lock_guard lock(mutex);
    const bool consequence = dynamic_cast<const PeerLostError*>(&error) != nullptr;
    if (first_error && !(first_is_consequence && !consequence)) return;
    first_error = std::current_exception();
    first_is_consequence = consequence;
  };
  std::vector<bool> running(static_cast<std::size_t>(size), true);

  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        auto core = std::make_shared<WorldCore>(WorldCore{.env = {},
                                                          .store = store.with_prefix("world"),
                                                          .liveness = liveness,
                                                          .monitor = nullptr,
                                                          .timeout = timeout});
        core->env.rank = rank;
        core->env.world_size = size;
        core->env.local_rank = rank;
        core->env.local_world_size = size;
        core->name_suffix = fmt::format("@{}.{}", world_number, rank);
        core->store.watch(liveness, rank);
        World world(std::move(core), P2PTransport::Auto);
        try {
          body(world);
        } catch (const std::exception& error) {
          note(error);
          // Before the world is destroyed: its destructor knows only that an exception was thrown.
          world.fail(error.what());
          throw;
        }
        liveness->report({rank, RankState::Left, ""});
      } catch (const std::exception& error) {
        note(error);
        liveness->report({rank, RankState::Failed, error.what()});
      }
      std::lock_guard lock(mutex);
      running[static_cast<std::size_t>(rank)] = false;
      ended.notify_all();
    });

  {
    std::unique_lock lock(mutex);
    const auto all_ended = [&] { return std::find(running.begin(), running.end(), true) == running.end(); };
    if (!ended.wait_until(lock, deadline, all_ended)) {
      const int slow = static_cast<int>(std::find(running.begin(), running.end(), true) - running.begin());
      if (!first_error)
        first_error = std::make_exception_ptr(
            TimeoutError(fmt::format("rank {} did not finish within the timeout of run_ranks", slow),
                         {.rank = slow, .elapsed_s = std::chrono::duration<double>(timeout).count()}));
      lock.unlock();
      liveness->report({slow, RankState::Failed, "it did not finish in time"});  // ends every wait
    }
  }
  for (auto& thread : threads) thread.join();
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace penstock::comm
