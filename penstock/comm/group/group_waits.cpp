#include "penstock/comm/group/group_waits.h"

#include <fmt/format.h>

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "penstock/base/exception_text.h"
#include "penstock/base/log.h"
#include "penstock/base/text.h"
#include "penstock/comm/group/checked_transfer.h"
#include "penstock/comm/group/work_state.h"

namespace penstock::comm {

namespace {

// How long a rank that timed out waits for the others to report what they are doing.
constexpr auto kStatusWaitTime = std::chrono::milliseconds(1500);
// Waiting ranks post their status after this fraction (1/n) of the timeout, so that a rank that is slow to
// wake up still has posted one.
constexpr int kStatusPostFraction = 4;
// How long a point-to-point wait lasts before its contract is compared with the other side's.
constexpr auto kContractCheckDelay = std::chrono::milliseconds(300);
// How long the end of a group waits for a check under way.
constexpr auto kLastCheckTime = std::chrono::seconds(1);

std::string place_text(const WorkState& work) {
  return fmt::format("{}{}", work.operation(), work.label().empty() ? "" : " \"" + work.label() + "\"");
}

}  // namespace

GroupWaits::GroupWaits(Store store, std::string common_name, std::vector<int> ranks, int position)
    : common_name_(std::move(common_name)),
      ranks_(std::move(ranks)),
      position_(position),
      store_(std::move(store)) {}

GroupWaits::Scope::Scope(GroupWaits& waits, Transfer& transfer, const WorkState& work,
                         Clock::time_point deadline)
    : waits_(waits) {
  const auto now = Clock::now();
  const std::lock_guard lock(waits_.mutex_);
  place_ = waits_.waiting_.insert(waits_.waiting_.end(),
                                  {&transfer, now, now + (deadline - now) / kStatusPostFraction, &work});
}

GroupWaits::Scope::~Scope() {
  const std::lock_guard lock(waits_.mutex_);
  waits_.waiting_.erase(place_);
}

void GroupWaits::interrupt() {
  const std::lock_guard lock(mutex_);
  for (const GroupWait& wait : waiting_) wait.transfer->interrupt();
}

std::string GroupWaits::mismatch() const {
  const std::lock_guard lock(mutex_);
  return mismatch_;
}

void GroupWaits::close() {
  std::unique_lock lock(mutex_);
  closed_ = true;
  if (checked_.wait_for(lock, kLastCheckTime, [&] { return !checking_; })) store_.reset();
}

void GroupWaits::check() {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    checking_ = true;
  }
  try {
    compare_with_others();
  } catch (const std::exception& error) {
    // The store does not answer: the waits themselves will report which rank was lost.
    log().debug("comm: the waits of group {} could not be compared: {}", common_name_, error.what());
  }
  const std::lock_guard lock(mutex_);
  checking_ = false;
  if (closed_) store_.reset();
  checked_.notify_all();
}

void GroupWaits::compare_with_others() {
  post_long_wait();
  std::vector<std::pair<ExpectedTransfer, std::string>> lasting;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    for (const GroupWait& wait : waiting_)
      if (Clock::now() - wait.since > kContractCheckDelay)
        for (const ExpectedTransfer& expected : wait.work->expected_transfers())
          lasting.emplace_back(expected, wait.work->label());
  }
  for (const auto& [expected, label] : lasting) {
    const std::string found = find_mismatch(expected, label);
    if (found.empty()) continue;
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    mismatch_ = found;
    for (const GroupWait& wait : waiting_) wait.transfer->interrupt();
    return;
  }
}

std::string GroupWaits::status_key(int position) const {
  return fmt::format("stall/{}/{}", common_name_, position);
}

void GroupWaits::post_long_wait() {
  if (status_posted_) return;
  const std::lock_guard status_lock(status_mutex_);
  std::string text;
  {
    // Set while the wait cannot end, so that it withdraws the status when it does.
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    for (const GroupWait& wait : waiting_)
      if (now >= wait.post_at && text.empty()) text = place_text(*wait.work);
    status_posted_ = !text.empty();
  }
  if (!text.empty()) store_->set(status_key(position_), text);
}

void GroupWaits::withdraw_posts() {
  if (!status_posted_ && !contracts_posted_) [[likely]]
    return;
  const std::lock_guard status_lock(status_mutex_);
  try {
    if (status_posted_) store_->set(status_key(position_), "");
    status_posted_ = false;  // posted again for other waits of this group that continue
    for (const std::string& key : contracts_) store_->remove(key);
    contracts_.clear();
    contracts_posted_ = false;
  } catch (const std::exception& error) {
    // The wait itself succeeded.
    log().debug("comm: cannot withdraw this rank's status from the store: {}", error.what());
  }
}

std::string GroupWaits::describe_missing_ranks(const WorkState& work) {
  // Every rank that times out posts what it is doing; a rank that posts nothing is the one to investigate.
  try {
    store_->set(status_key(position_), place_text(work));
    std::vector<std::string> statuses(ranks_.size());
    std::vector<int> silent;
    for (const auto until = Clock::now() + kStatusWaitTime;;) {
      silent.clear();
      for (std::size_t i = 0; i < ranks_.size(); ++i) {
        if (statuses[i].empty()) statuses[i] = store_->try_get(status_key(static_cast<int>(i))).value_or("");
        if (statuses[i].empty()) silent.push_back(ranks_[i]);
      }
      if (silent.empty() || Clock::now() >= until) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    std::string text;
    if (!silent.empty())
      text += fmt::format("; no status from rank{} {} (busy elsewhere or stopped)",
                          silent.size() > 1 ? "s" : "", format_list(silent));
    for (std::size_t i = 0; i < ranks_.size() && i < 16; ++i)
      if (!statuses[i].empty() && static_cast<int>(i) != position_)
        text += fmt::format("; rank {} is in {}", ranks_[i], statuses[i]);
    return text;
  } catch (const std::exception& error) {
    return fmt::format("; the store does not answer either ({})", without_backtrace(error.what()));
  }
}

std::string GroupWaits::find_mismatch(const ExpectedTransfer& expected, const std::string& label) {
  const int other = ranks_[static_cast<std::size_t>(expected.position)];
  const int sender = expected.sends ? own_rank() : other, receiver = expected.sends ? other : own_rank();
  const auto key = [&](bool sends) {
    return fmt::format("p2p/{}/{}-{}/{}.{}/{}", common_name_, sender, receiver, expected.contract.tag,
                       expected.contract.number, sends ? "send" : "recv");
  };
  {
    const std::lock_guard lock(status_mutex_);
    contracts_.insert(key(expected.sends));
    contracts_posted_ = true;
    store_->set(key(expected.sends), expected.contract.to_bytes());
  }
  const auto posted = store_->try_get(key(!expected.sends));
  if (!posted) return {};  // the other side has not arrived, or is not waiting
  const Contract theirs = Contract::from_bytes(*posted);
  if (theirs.matches(expected.contract)) return {};
  return expected.sends ? describe_mismatch(sender, expected.contract, receiver, theirs, label)
                        : describe_mismatch(sender, theirs, receiver, expected.contract, label);
}

}  // namespace penstock::comm
