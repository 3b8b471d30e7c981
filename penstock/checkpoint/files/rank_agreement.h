// Agreement between the ranks that write or read a checkpoint together.
//
//   Bytes verdict = agreement.agree("write", [&] { write_my_parts(); return Bytes{}; },
//                                   [](const std::vector<Bytes>& results) { return Bytes{}; });  // on rank 0
//
// If one rank fails, all fail: when a rank's work throws, or rank 0's `judge` does, every rank throws the
// same CheckpointError, which names the ranks that failed and their reasons, each reason once. If all of
// those ranks threw a ConfigError, a CheckpointFormatError, a NotImplemented or an InvariantError, it is of
// that type. No rank is left waiting for a rank that has failed. Thread safety: one thread per rank at a
// time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace penstock::checkpoint {

// The maximum size of one message in this folder.
inline constexpr std::size_t kMaxMessageBytes = std::size_t{1} << 29;

using Bytes = std::vector<std::uint8_t>;

class RankAgreement {
 public:
  virtual ~RankAgreement() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // [collective] Every rank runs `work`; rank 0 runs `judge` on all results and returns its verdict on all
  // ranks. `topic` is for errors.
  Bytes agree(const std::string& topic, const std::function<Bytes()>& work,
              const std::function<Bytes(const std::vector<Bytes>&)>& judge);
  // The same for work that only succeeds or fails.
  void agree(const std::string& topic, const std::function<void()>& work);

 protected:
  // Rank 0 receives the messages of all ranks in order and computes the verdict, which all ranks return.
  // `judge` does not throw.
  virtual Bytes exchange(const std::string& topic, Bytes own,
                         const std::function<Bytes(std::vector<Bytes>)>& judge) = 0;
};

// For a single process.
class SingleRankAgreement final : public RankAgreement {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }

 protected:
  Bytes exchange(const std::string& topic, Bytes own,
                 const std::function<Bytes(std::vector<Bytes>)>& judge) override;
};

// A status text per rank that every rank can read; a new status replaces the previous one of the same rank.
class StatusBoard {
 public:
  virtual ~StatusBoard() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual void post(const std::string& status) = 0;
  virtual std::optional<std::string> status_of(int rank) = 0;
  // Why no further status of that rank can be expected, for example because it has died. Boards that cannot
  // tell leave it to the deadline.
  virtual std::optional<std::string> why_gone(int /*rank*/) { return std::nullopt; }
};

// Agreement over a board: polls instead of waiting in a collective, so that it does not interfere with other
// communication, can be cancelled at any time, and a missing rank fails only itself.
//
// Exchanges are numbered by rounds (one checkpoint) and steps within them. A rank that gives up a round posts
// that with its reason, and the others, at whatever step of that round, end with an error. A rank that is
// gone ends the round of those that wait for it at once, with a PeerLostError: the deadline of a round is
// that of slow disks, not of lost ranks.
class StatusBoardAgreement final : public RankAgreement {
 public:
  explicit StatusBoardAgreement(StatusBoard& board) : board_(board) {}

  // Every rank begins the same rounds in the same order. If a step is not agreed on by the deadline, throws a
  // CheckpointError that names the missing ranks. The others wait a little longer than rank 0, for its
  // verdict.
  void begin_round(std::chrono::steady_clock::time_point deadline);
  // Any thread may call: exchanges of this rank then end with an error.
  void give_up() { given_up_ = true; }

  int rank() const override { return board_.rank(); }
  int size() const override { return board_.size(); }

 protected:
  Bytes exchange(const std::string& topic, Bytes own,
                 const std::function<Bytes(std::vector<Bytes>)>& judge) override;

 private:
  // Waits for the status of `rank` for this step. Returns std::nullopt if it did not arrive in time. Throws
  // if that rank has given up or is gone.
  std::optional<Bytes> await(int rank, const std::string& topic);
  void post(const Bytes& message);
  // Posts that this rank has given up the round.
  void post_gone(const std::string& reason) noexcept;

  StatusBoard& board_;
  std::chrono::steady_clock::time_point deadline_{};
  std::uint64_t round_ = 0, step_ = 0;
  std::atomic<bool> given_up_{false};
};

}  // namespace penstock::checkpoint
