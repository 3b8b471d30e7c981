// Agreement between the ranks of a World.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "penstock/checkpoint/files/meeting.h"
#include "penstock/world.h"

namespace penstock::checkpoint {

// Uses collectives of the world's own group: for work that the caller waits for, such as opening and loading.
class WorldMeeting final : public Meeting {
 public:
  explicit WorldMeeting(const comm::World& world) : group_(world.group()), rank_(world.rank()) {}

  int rank() const override { return rank_; }
  int size() const override { return group_.size(); }

 protected:
  Bytes exchange(const std::string& topic, Bytes own, const std::function<Bytes(std::vector<Bytes>)>& judge) override;

 private:
  comm::Group group_;
  int rank_;
};

// Uses the world's store: for background work. Thread safety: any thread, one at a time.
class WorldBoard final : public WordBoard {
 public:
  // [collective] Every board has a unique key: texts of an earlier board are not visible.

  explicit WorldBoard(const comm::World& world);

  int rank() const override { return world_.rank(); }
  int size() const override { return world_.size(); }
  void leave(const std::string& word) override { world_.leave_word(key_, word); }
  std::optional<std::string> word_of(int rank) override { return world_.word_of(rank, key_); }

 private:
  comm::World world_;
  std::string key_;
};

}  // namespace penstock::checkpoint
