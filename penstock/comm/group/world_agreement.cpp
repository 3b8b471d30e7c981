#include "penstock/comm/group/world_agreement.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <thread>

#include "penstock/base/text.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

// Rank 0 decides and the others wait for its answer. They wait this much longer, so that its reason arrives
// before they time out themselves.
constexpr auto kAnswerSlack = std::chrono::seconds(3);
// Rank 0 hosts the store: before it ends after a negative verdict, it waits at most this long for the others
// to read it.
constexpr auto kVerdictReadTime = std::chrono::seconds(2);

}  // namespace

std::string agree(
    const WorldCore& core, const std::string& topic, const std::string& own_text, Clock::time_point deadline,
    const std::function<std::string(const std::vector<std::string>&, std::string& error)>& judge,
    Wrong wrong) {
  const int size = core.env.world_size;
  const auto key = [&](int rank) { return fmt::format("{}/{}", topic, rank); };
  const auto begin = Clock::now();
  const auto context = [&] {
    CommContext where;
    where.rank = core.env.rank;
    where.operation = topic;
    where.elapsed_s = std::chrono::duration<double>(Clock::now() - begin).count();
    return where;
  };
  core.store.set(key(core.env.rank), own_text);
  const std::string verdict_key = topic + "/verdict";
  if (core.env.rank == 0) {
    std::vector<std::string> texts(static_cast<std::size_t>(size));
    std::vector<int> missing;
    for (int rank = 0; rank < size; ++rank) {
      try {
        texts[static_cast<std::size_t>(rank)] =
            core.store.get(key(rank), deadline, fmt::format("rank {} to join {}", rank, topic));
      } catch (const TimeoutError&) {
        missing.push_back(rank);
      }
    }
    std::string error;
    const std::string verdict = missing.empty() ? judge(texts, error) : "";
    const bool bad = !missing.empty() || !error.empty();
    core.store.set(verdict_key, !missing.empty() ? "missing " + format_list(missing)
                                : !error.empty() ? "error " + error
                                                 : "ok " + verdict);
    const auto present = size - 1 - static_cast<std::int64_t>(missing.size());
    for (const auto until = Clock::now() + kVerdictReadTime;
         bad && Clock::now() < until && core.store.add(topic + "/heard", 0) < present;)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::string verdict;
  try {
    verdict =
        core.store.get(verdict_key, deadline + kAnswerSlack, fmt::format("rank 0's answer on {}", topic));
  } catch (const TimeoutError&) {
    std::vector<int> missing;
    for (int rank = 0; rank < size; ++rank)
      if (!core.store.has(key(rank))) missing.push_back(rank);
    verdict = "missing " +
              (missing.empty() ? std::string("0 (it joined, but did not answer)") : format_list(missing));
  }
  if (core.env.rank != 0 && !verdict.starts_with("ok ")) core.store.add(topic + "/heard", 1);
  if (verdict.starts_with("missing "))
    throw TimeoutError(
        fmt::format("{}: rank{} {} of {} did not join in time; start all {} ranks, or allow more time with "
                    "PENSTOCK_TIMEOUT_S",
                    topic, verdict.find(',') == std::string::npos ? "" : "s", verdict.substr(8), size, size),
        context());
  if (verdict.starts_with("error ") && wrong == Wrong::Network) throw CommError(verdict.substr(6), context());
  if (verdict.starts_with("error ")) throw ValueError(verdict.substr(6));
  return verdict.substr(3);
}

}  // namespace penstock::comm
