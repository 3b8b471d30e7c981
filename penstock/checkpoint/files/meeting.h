// How the ranks that write or read a checkpoint together come to one word.
//
//   Bytes verdict = meeting.agree("write", [&] { write_my_parts(); return Bytes{}; },
//                                 [](const std::vector<Bytes>& said) { return Bytes{}; });      // runs on rank 0
//
// One rank's failure is everybody's: when a rank's work throws, or rank 0's judgement does, every rank throws the same
// CheckpointError, which names the ranks that failed and their reasons, each reason once; a ConfigError where that is what all of
// those ranks had. Nobody is left waiting for a rank that has failed.
// Thread rule: one thread per rank at a time.
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

// The most that one word of the meetings of this folder may hold.
inline constexpr std::size_t kMaxMessageBytes = std::size_t{1} << 29;

using Bytes = std::vector<std::uint8_t>;

class Meeting {
 public:
  virtual ~Meeting() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // [collective] Every rank does its work; rank 0 judges what they said and gives all of them its verdict. `topic` is for errors.
  Bytes agree(const std::string& topic, const std::function<Bytes()>& work, const std::function<Bytes(const std::vector<Bytes>&)>& judge);
  // The same for work that only succeeds or fails.
  void agree(const std::string& topic, const std::function<void()>& work);

 protected:
  // Rank 0 gets the words of all ranks in order, makes the verdict of them, and all ranks return it. The function does not throw.
  virtual Bytes exchange(const std::string& topic, Bytes own, const std::function<Bytes(std::vector<Bytes>)>& judge) = 0;
};

// A single process.
class LoneMeeting final : public Meeting {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }

 protected:
  Bytes exchange(const std::string& topic, Bytes own, const std::function<Bytes(std::vector<Bytes>)>& judge) override;
};

// Words that every rank can leave and read; a later word takes the place of an earlier one of the same rank.
class WordBoard {
 public:
  virtual ~WordBoard() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual void leave(const std::string& word) = 0;
  virtual std::optional<std::string> word_of(int rank) = 0;
};

// A meeting over a board: it asks again and again instead of waiting in a collective, so that it disturbs no other
// communication, can be given up at any moment, and a rank that does not come is nobody's failure but its own.
//
// Meetings are numbered by rounds (one checkpoint) and steps within them. A rank that gives a round up leaves a word about it,
// and the others, wherever they are in that round, end with an error.
class BoardMeeting final : public Meeting {
 public:
  explicit BoardMeeting(WordBoard& board) : board_(board) {}

  // Every rank begins the same rounds in the same order. What is not agreed on by the deadline throws CheckpointError naming the
  // ranks that did not come; the others wait a little longer than rank 0, for its word on it.
  void begin_round(std::chrono::steady_clock::time_point deadline);
  // From any thread: meetings of this rank end with an error from now on.
  void give_up() { given_up_ = true; }

  int rank() const override { return board_.rank(); }
  int size() const override { return board_.size(); }

 protected:
  Bytes exchange(const std::string& topic, Bytes own, const std::function<Bytes(std::vector<Bytes>)>& judge) override;

 private:
  // Waits for the word of `rank` for this step. Nothing: it did not come in time. Throws when that rank has given up.
  std::optional<Bytes> await(int rank, const std::string& topic);
  void leave(const Bytes& word);

  WordBoard& board_;
  std::chrono::steady_clock::time_point deadline_{};
  std::uint64_t round_ = 0, step_ = 0;
  std::atomic<bool> given_up_{false};
};

}  // namespace penstock::checkpoint
