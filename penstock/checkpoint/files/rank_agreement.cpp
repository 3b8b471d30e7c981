#include "penstock/checkpoint/files/rank_agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <optional>
#include <thread>
#include <utility>

#include "penstock/base/exception_text.h"
#include "penstock/base/text.h"
#include "penstock/checkpoint_types.h"
#include "penstock/comm/message/message.h"
#include "penstock/errors.h"

namespace penstock::checkpoint {

namespace {

constexpr comm::MessageKind kOutcome{"CKPO"};
constexpr comm::MessageKind kStatus{"CKPW"};
constexpr std::size_t kMaxStatusBytes = std::size_t{1} << 30;
// Rank 0 decides and the others wait for its verdict: this much longer, so that it arrives before their own
// deadline.
constexpr std::chrono::seconds kVerdictSlack{3};
// Step number for "this rank has left the round".
constexpr std::uint64_t kGone = std::numeric_limits<std::uint64_t>::max();

// Types of errors that keep their type: callers react to them differently than to an unusable checkpoint.
enum class FailureKind : std::uint8_t { Checkpoint, Config, Format, NotImplemented, Invariant };

struct RankResult {
  bool good = true;
  FailureKind kind = FailureKind::Checkpoint;  // if it is not good
  std::string error;
  Bytes bytes;
};

Bytes to_bytes(const RankResult& outcome) {
  return comm::MessageWriter(kOutcome, 2, kMaxStatusBytes)
      .write(outcome.good)
      .write(static_cast<std::uint8_t>(outcome.kind))
      .write(outcome.error)
      .write(outcome.bytes)
      .finish();
}

RankResult rank_result_of(const Bytes& bytes) {
  comm::MessageReader reader(bytes, kOutcome, {2, 2}, kMaxStatusBytes);
  RankResult outcome;
  reader.read(outcome.good);
  outcome.kind = static_cast<FailureKind>(reader.read<std::uint8_t>());
  reader.read(outcome.error).read(outcome.bytes);
  reader.expect_end();
  return outcome;
}

FailureKind kind_of(const std::exception& error) {
  if (dynamic_cast<const ConfigError*>(&error) != nullptr) return FailureKind::Config;
  if (dynamic_cast<const CheckpointFormatError*>(&error) != nullptr) return FailureKind::Format;
  if (dynamic_cast<const NotImplemented*>(&error) != nullptr) return FailureKind::NotImplemented;
  if (dynamic_cast<const InvariantError*>(&error) != nullptr) return FailureKind::Invariant;
  return FailureKind::Checkpoint;
}

[[noreturn]] void throw_as(FailureKind kind, const std::string& text) {
  switch (kind) {
    case FailureKind::Config:
      throw ConfigError(text);
    case FailureKind::Format:
      throw CheckpointFormatError(text);
    case FailureKind::NotImplemented:
      throw NotImplemented(text);
    case FailureKind::Invariant:
      throw InvariantError(text);
    case FailureKind::Checkpoint:
      break;
  }
  throw CheckpointError(text);
}

template <class Work>
RankResult attempt(Work&& work) {
  try {
    return {true, {}, "", work()};
  } catch (const std::exception& error) {
    return {false, kind_of(error), without_backtrace(error.what()), {}};
  }
}

// Throws the errors of the ranks that failed, each text once, as their type if they have one in common.
// Ranks are not named for an error that all ranks report, nor for a configuration error of rank 0, which
// checks it on behalf of all.
void throw_errors(const std::vector<RankResult>& rank_results) {
  std::vector<std::pair<std::string, std::vector<int>>> texts;
  std::optional<FailureKind> common;
  for (std::size_t rank = 0; rank < rank_results.size(); ++rank) {
    if (rank_results[rank].good) continue;
    const FailureKind kind = rank_results[rank].kind;
    common = common.value_or(kind) == kind ? kind : FailureKind::Checkpoint;
    auto same = std::find_if(texts.begin(), texts.end(),
                             [&](const auto& text) { return text.first == rank_results[rank].error; });
    if (same == texts.end()) same = texts.insert(texts.end(), {rank_results[rank].error, {}});
    same->second.push_back(static_cast<int>(rank));
  }
  if (texts.empty()) return;
  const bool config_errors = common == FailureKind::Config;
  std::string errors;
  for (const auto& [text, ranks] : texts) {
    const bool of_all =
        ranks.size() == rank_results.size() || (config_errors && texts.size() == 1 && ranks.front() == 0);
    errors += fmt::format(
        "{}{}{}", errors.empty() ? "" : "\n",
        of_all ? "" : fmt::format("rank{} {}: ", ranks.size() > 1 ? "s" : "", format_list(ranks)), text);
  }
  throw_as(*common, errors);
}

}  // namespace

Bytes RankAgreement::agree(const std::string& topic, const std::function<Bytes()>& work,
                           const std::function<Bytes(const std::vector<Bytes>&)>& judge) {
  const Bytes own = to_bytes(attempt(work));
  const Bytes verdict = exchange(topic, own, [&](std::vector<Bytes> messages) {
    return to_bytes(attempt([&] {
      std::vector<RankResult> rank_results;
      for (const Bytes& message : messages) rank_results.push_back(rank_result_of(message));
      throw_errors(rank_results);
      std::vector<Bytes> results;
      for (RankResult& outcome : rank_results) results.push_back(std::move(outcome.bytes));
      return judge(results);
    }));
  });
  RankResult outcome = rank_result_of(verdict);
  if (!outcome.good) throw_as(outcome.kind, outcome.error);
  return std::move(outcome.bytes);
}

void RankAgreement::agree(const std::string& topic, const std::function<void()>& work) {
  agree(
      topic,
      [&] {
        work();
        return Bytes{};
      },
      [](const std::vector<Bytes>&) { return Bytes{}; });
}

Bytes SingleRankAgreement::exchange(const std::string&, Bytes own,
                                    const std::function<Bytes(std::vector<Bytes>)>& judge) {
  return judge({std::move(own)});
}

void StatusBoardAgreement::begin_round(std::chrono::steady_clock::time_point deadline) {
  deadline_ = deadline;
  ++round_;
  step_ = 0;
}

void StatusBoardAgreement::post(const Bytes& message) {
  const Bytes bytes =
      comm::MessageWriter(kStatus, 1, kMaxStatusBytes).write(round_).write(step_).write(message).finish();
  board_.post(std::string(bytes.begin(), bytes.end()));
}

std::optional<Bytes> StatusBoardAgreement::await(int rank, const std::string& topic) {
  auto pause = std::chrono::microseconds(100);
  for (;;) {
    if (given_up_)
      throw CheckpointError(fmt::format("checkpoint: rank {} abandoned it ({})", board_.rank(), topic));
    // Before the status is read: a rank may post its last one and end between the two.
    const std::optional<std::string> gone = board_.why_gone(rank);
    if (const auto text = board_.status_of(rank)) {
      const Bytes bytes(text->begin(), text->end());
      comm::MessageReader reader(bytes, kStatus, {1, 1}, kMaxStatusBytes);
      const auto round = reader.read<std::uint64_t>(), step = reader.read<std::uint64_t>();
      auto message = reader.read<Bytes>();
      reader.expect_end();
      if (round == round_ && step == step_) return message;
      if (round > round_ || (round == round_ && step > step_))
        throw CheckpointError(fmt::format(
            "checkpoint: rank {} has abandoned it while rank {} was at \"{}\"{}{}", rank, board_.rank(),
            topic, message.empty() ? "" : ": ", std::string(message.begin(), message.end())));
    }
    if (gone) {
      const std::string reason = fmt::format("{}, while rank {} waited for its part in a checkpoint (\"{}\")",
                                             *gone, board_.rank(), topic);
      CommContext context;
      context.rank = board_.rank();
      context.lost_rank = rank;
      context.operation = "checkpoint: " + topic;
      throw PeerLostError(reason, context);
    }
    if (std::chrono::steady_clock::now() > deadline_ + (rank == 0 ? kVerdictSlack : std::chrono::seconds(0)))
      return std::nullopt;
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(10'000));
  }
}

Bytes StatusBoardAgreement::exchange(const std::string& topic, Bytes own,
                                     const std::function<Bytes(std::vector<Bytes>)>& judge) {
  try {
    ++step_;
    if (board_.rank() != 0) {
      post(own);
      auto verdict = await(0, topic);
      if (!verdict)
        throw CheckpointError(
            fmt::format("checkpoint: \"{}\" was not agreed on before the deadline: rank 0 did not answer; "
                        "allow more time, or check its disk",
                        topic));
      return *std::move(verdict);
    }
    std::vector<Bytes> messages{std::move(own)};
    std::vector<int> missing;
    for (int rank = 1; rank < board_.size(); ++rank) {
      auto message = await(rank, topic);
      if (!message) missing.push_back(rank);
      messages.push_back(message ? *std::move(message) : Bytes{});
    }
    // Rank 0 reports the missing ranks, so that the others do not wait for their own deadline.
    Bytes verdict;
    if (missing.empty()) {
      verdict = judge(std::move(messages));
    } else {
      const bool several = missing.size() > 1;
      verdict = to_bytes(
          {false,
           FailureKind::Checkpoint,
           fmt::format("checkpoint: \"{}\" was not agreed on before the deadline: rank{} {} did not join; "
                       "allow more time, or check {} disk{}",
                       topic, several ? "s" : "", format_list(missing), several ? "their" : "its",
                       several ? "s" : ""),
           {}});
    }
    post(verdict);
    return verdict;
  } catch (const std::exception& error) {
    post_gone(without_backtrace(error.what()));
    throw;
  }
}

void StatusBoardAgreement::post_gone(const std::string& reason) noexcept {
  step_ = kGone;
  try {
    post(Bytes(reason.begin(), reason.end()));
  } catch (const std::exception&) {
    // The board itself is gone, and so are the ranks that could read it; the original error is the one to
    // report.
  }
}

}  // namespace penstock::checkpoint
