#include "penstock/comm/group/member_groups.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>
#include <thread>

#include "penstock/base/describe.h"
#include "penstock/base/log.h"
#include "penstock/base/text.h"
#include "penstock/comm/group/group_maker.h"
#include "penstock/comm/group/work_state.h"
#include "penstock/errors.h"
#include "penstock/step_context.h"

namespace penstock::comm {

namespace {

constexpr auto kShortestPause = std::chrono::microseconds(200);
constexpr auto kLongestPause = std::chrono::milliseconds(20);
// If all members have reported but the deciding member has not answered after this time, it counts as
// missing.
constexpr auto kVerdictSlack = std::chrono::seconds(3);

// Grows from call to call, so that fast partners are noticed quickly and slow ones cost little.
class Pause {
 public:
  std::chrono::microseconds next() {
    const auto now = pause_;
    pause_ = std::min<std::chrono::microseconds>(pause_ * 2, kLongestPause);
    return now;
  }

 private:
  std::chrono::microseconds pause_ = kShortestPause;
};

}  // namespace

struct MemberGroups::Opening {
  std::vector<int> ranks;
  std::string purpose;
  P2PTransport p2p = P2PTransport::Auto;
  std::string name;  // of the group; also its prefix in the store
  Clock::time_point begin = Clock::now();

  std::thread thread;
  // Guarded by mutex_.
  bool ended = false;
  std::shared_ptr<GroupState> group;
  std::exception_ptr error;

  std::string key(const std::string& part) const { return name + "/" + part; }
  std::string here(int rank) const { return fmt::format("{}/here/{}", name, rank); }

  // The notice to the other members: "0,1,2;0;purpose".
  std::string to_notice() const {
    return fmt::format("{};{};{}", fmt::join(ranks, ","), static_cast<int>(p2p), purpose);
  }
  static Key parse_notice(const std::string& notice) {
    Key key;
    std::stringstream parts(notice);
    std::string list, transport;
    std::getline(parts, list, ';');
    std::getline(parts, transport, ';');
    std::getline(parts, key.purpose, '\0');
    key.p2p = static_cast<P2PTransport>(std::stoi(transport));
    std::stringstream ranks(list);
    for (std::string rank; std::getline(ranks, rank, ',');) key.ranks.push_back(std::stoi(rank));
    return key;
  }
};

std::string rank_list_text(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i + 1;  // of the run of equal steps that starts at i
    const int step = end < ranks.size() ? ranks[end] - ranks[i] : 0;
    while (step > 0 && end < ranks.size() && ranks[end] - ranks[end - 1] == step) ++end;
    if (end - i < (step == 1 ? 2U : 3U)) end = i + 1;
    if (!text.empty()) text += ",";
    text += fmt::format("{}", ranks[i]);
    if (end - i > 1) text += fmt::format("-{}", ranks[end - 1]);
    if (end - i > 1 && step > 1) text += fmt::format(":{}", step);
    i = end;
  }
  return text;
}

MemberGroups::MemberGroups(std::shared_ptr<WorldCore> core) : core_(std::move(core)) {}

MemberGroups::~MemberGroups() {
  closing_ = true;
  for (auto& [key, opening] : openings_)
    if (opening->thread.joinable()) opening->thread.join();
}

Group MemberGroups::get(const std::vector<int>& ranks, const MemberGroupOptions& options) {
  const int own = core_->env.rank;
  if (const std::string bad = validation_error(ranks, core_->env.world_size); !bad.empty())
    throw ValueError(fmt::format("group of ranks [{}]: {}", format_list(ranks), bad));
  if (std::find(ranks.begin(), ranks.end(), own) == ranks.end())
    throw ValueError(describe("group of ranks", fmt::format("[{}] on rank {}", format_list(ranks), own),
                              "a list that contains the own rank", "call it on members only"));
  const auto deadline = Clock::now() + (options.timeout.count() > 0 ? options.timeout : core_->timeout);
  std::string name;
  try {
    std::unique_lock lock(mutex_);
    const Key key{ranks, options.purpose, options.p2p};
    // A trial run does not communicate, so it opens no group either: its operations on this group are skipped
    // before they reach a backend.
    if (StepContext::current()->trial && !is_open(key))
      return Group(
          std::make_shared<GroupState>(core_, name_of(key) + core_->name_suffix, ranks, core_->timeout));
    Opening& opening = begin(key);
    name = opening.name;
    if (!opening.ended && ranks.size() > 1) {
      lock.unlock();
      notify_members(opening);
      lock.lock();
    }
    for (Pause pause; !opening.ended;) {
      if (ended_.wait_for(lock, pause.next(), [&] { return opening.ended; })) break;
      lock.unlock();
      read_inbox();
      const auto now = Clock::now();
      check_missing(opening, now >= deadline, now >= deadline + kVerdictSlack);
      lock.lock();
    }
    if (opening.error) std::rethrow_exception(opening.error);
    return Group(opening.group);
  } catch (...) {
    rethrow_as_group_error(*core_, name, "group of " + name);
  }
}

std::string MemberGroups::name_of(const Key& key) {
  return fmt::format("ranks[{}]{}{}", rank_list_text(key.ranks), key.purpose.empty() ? "" : ".", key.purpose);
}

bool MemberGroups::is_open(const Key& key) const {
  const auto found = openings_.find(key);
  return found != openings_.end() && found->second->ended;
}

MemberGroups::Opening& MemberGroups::begin(const Key& key) {
  std::unique_ptr<Opening>& opening = openings_[key];
  if (opening) return *opening;
  opening = std::make_unique<Opening>();
  opening->ranks = key.ranks;
  opening->purpose = key.purpose;
  opening->p2p = key.p2p;
  opening->name = name_of(key);
  if (core_->fake || key.ranks.size() == 1) {  // no other member to wait for
    try {
      opening->group = open(*opening);
    } catch (...) {
      opening->error = std::current_exception();
    }
    opening->ended = true;
    return *opening;
  }
  opening->thread = std::thread([this, mine = opening.get()] { run(*mine); });
  return *opening;
}

void MemberGroups::run(Opening& opening) {
  std::shared_ptr<GroupState> group;
  std::exception_ptr error;
  try {
    group = open(opening);
  } catch (const std::exception& failure) {
    log().debug("comm: group of {} was not created: {}", opening.name, failure.what());
    error = std::current_exception();
  }
  std::lock_guard lock(mutex_);
  opening.group = std::move(group);
  opening.error = error;
  opening.ended = true;
  ended_.notify_all();
}

std::shared_ptr<GroupState> MemberGroups::open(const Opening& opening) {
  CommContext context;
  context.rank = core_->env.rank;
  context.operation = "group_of";
  context.group = opening.name;
  const std::string verdict = core_->fake || opening.ranks.size() == 1 ? "ok" : await_verdict(opening);
  context.elapsed_s = std::chrono::duration<double>(Clock::now() - opening.begin).count();
  if (verdict.starts_with("missing "))
    throw TimeoutError(
        fmt::format(
            "group of {}: rank{} {} did not request it in time; let every member request the group, or allow "
            "more time with PENSTOCK_TIMEOUT_S",
            opening.name, verdict.find(',') == std::string::npos ? "" : "s", verdict.substr(8)),
        context);
  if (verdict.starts_with("left ")) {
    context.lost_rank = std::stoi(verdict.substr(5));
    throw PeerLostError(
        fmt::format("group of {}: rank {} has left; let every member request the group before it ends",
                    opening.name, *context.lost_rank),
        context);
  }
  if (verdict.starts_with("error ")) throw ValueError(verdict.substr(6));
  GroupRecipe recipe;
  recipe.name = opening.name;
  recipe.key = opening.name;
  recipe.ranks = opening.ranks;
  recipe.timeout = core_->timeout;
  recipe.p2p = opening.p2p;
  return make_group(core_, recipe, Clock::now() + core_->timeout);
}

std::string MemberGroups::await_verdict(const Opening& opening) {
  const Store& store = core_->store;
  const int own = core_->env.rank;
  const bool judges = opening.ranks.front() == own;
  store.set(opening.here(own), p2p_transport_name(opening.p2p));
  // After the report itself, so that a full count implies that all reports are present.
  store.add(opening.key("count"), 1);
  bool judged = false;
  for (Pause pause;;) {
    if (auto verdict = store.try_get(opening.key("verdict"))) return *verdict;
    if (judges && !judged &&
        store.add(opening.key("count"), 0) == static_cast<std::int64_t>(opening.ranks.size())) {
      decide(opening, judge(opening));
      judged = true;
      continue;
    }
    if (closing_) {
      const std::string left = fmt::format("left {}", own);
      decide(opening, left);
      return store.try_get(opening.key("verdict")).value_or(left);
    }
    if (const auto failure = core_->liveness->first_failure()) {
      // A verdict, which may give the reason, is more informative than the death of the rank that wrote it.
      if (auto verdict = store.try_get(opening.key("verdict"))) return *verdict;
      CommContext context;
      context.rank = own;
      context.operation = "group_of";
      context.group = opening.name;
      failure->raise(context, fmt::format(", while waiting for the group of {}", opening.name));
    }
    std::this_thread::sleep_for(pause.next());
  }
}

std::string MemberGroups::judge(const Opening& opening) const {
  const auto report = [&](int rank) { return core_->store.try_get(opening.here(rank)).value_or(""); };
  const int first = opening.ranks.front();
  for (const int rank : opening.ranks)
    if (report(rank) != report(first))
      return fmt::format(
          "error group of {}: rank {} uses {} for point-to-point transfers, rank {} uses {}; set "
          "PENSTOCK_P2P to the same value on all ranks",
          opening.name, first, report(first), rank, report(rank));
  return "ok";
}

void MemberGroups::decide(const Opening& opening, const std::string& verdict) const {
  if (core_->store.add(opening.key("decided"), 1) == 1) core_->store.set(opening.key("verdict"), verdict);
}

void MemberGroups::notify_members(const Opening& opening) const {
  const Store& store = core_->store;
  if (store.add(opening.key("asked"), 1) != 1) return;
  const std::string notice = opening.to_notice();
  for (const int rank : opening.ranks) {
    if (rank == core_->env.rank) continue;
    const std::int64_t number = store.add(fmt::format("inbox/{}/count", rank), 1);
    store.set(fmt::format("inbox/{}/{}", rank, number), notice);
  }
}

void MemberGroups::read_inbox() {
  std::lock_guard inbox_lock(inbox_mutex_);
  const Store& store = core_->store;
  const int own = core_->env.rank;
  const std::int64_t count = store.add(fmt::format("inbox/{}/count", own), 0);
  while (inbox_read_ < count) {
    const auto notice = store.try_get(fmt::format("inbox/{}/{}", own, inbox_read_ + 1));
    if (!notice) return;  // counted, but not written yet
    ++inbox_read_;
    std::lock_guard lock(mutex_);
    begin(Opening::parse_notice(*notice));
  }
}

void MemberGroups::check_missing(const Opening& opening, bool deadline_passed, bool slack_passed) const {
  for (const int rank : opening.ranks)
    if (core_->liveness->state_of(rank).state == RankState::Left && !core_->store.has(opening.here(rank)))
      decide(opening, fmt::format("left {}", rank));
  if (!deadline_passed || core_->store.has(opening.key("verdict"))) return;
  std::vector<int> missing;
  for (const int rank : opening.ranks)
    if (!core_->store.has(opening.here(rank))) missing.push_back(rank);
  if (missing.empty() && slack_passed) missing.push_back(opening.ranks.front());
  if (!missing.empty()) decide(opening, "missing " + format_list(missing));
}

}  // namespace penstock::comm
