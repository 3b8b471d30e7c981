#include "penstock/comm/group/stall_watch.h"

#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "penstock/comm/group/group_waits.h"

namespace penstock::comm {

namespace {

constexpr auto kPeriod = std::chrono::milliseconds(250);

struct Watch {
  std::mutex mutex;
  std::vector<std::weak_ptr<GroupWaits>> groups;
  bool running = false;
};

// Never destroyed: the thread is detached and may outlive main.
Watch& watch() {
  static Watch* instance = new Watch;
  return *instance;
}

void look() {
  for (;;) {
    std::this_thread::sleep_for(kPeriod);
    std::vector<std::shared_ptr<GroupWaits>> alive;
    {
      std::lock_guard lock(watch().mutex);
      std::erase_if(watch().groups, [](const auto& group) { return group.expired(); });
      if (watch().groups.empty()) {
        watch().running = false;
        return;
      }
      for (const auto& weak : watch().groups)
        if (auto group = weak.lock()) alive.push_back(std::move(group));
    }
    for (const auto& group : alive) group->check();
  }
}

}  // namespace

void watch_for_stalls(const std::shared_ptr<GroupWaits>& waits) {
  std::lock_guard lock(watch().mutex);
  watch().groups.push_back(waits);
  if (watch().running) return;
  watch().running = true;
  std::thread(look).detach();
}

}  // namespace penstock::comm
