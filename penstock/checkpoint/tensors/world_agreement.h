// Agreement between the ranks of a World.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "penstock/checkpoint/files/rank_agreement.h"
#include "penstock/world.h"

namespace penstock::checkpoint {

// Uses collectives of the world's own group: for work that the caller waits for, such as opening and loading.
class WorldAgreement final : public RankAgreement {
 public:
  explicit WorldAgreement(const comm::World& world) : group_(world.group()), rank_(world.rank()) {}

  int rank() const override { return rank_; }
  int size() const override { return group_.size(); }

 protected:
  Bytes exchange(const std::string& topic, Bytes own,
                 const std::function<Bytes(std::vector<Bytes>)>& judge) override;

 private:
  comm::Group group_;
  int rank_;
};

// Uses the world's store: for background work. Thread safety: any thread, one at a time.
class WorldStatusBoard final : public StatusBoard {
 public:
  // [collective] Every board has a unique key: texts of an earlier board are not visible.

  explicit WorldStatusBoard(const comm::World& world);

  int rank() const override { return world_.rank(); }
  int size() const override { return world_.size(); }
  void post(const std::string& status) override { world_.post_status(key_, status); }
  std::optional<std::string> status_of(int rank) override { return world_.status_of(rank, key_); }
  std::optional<std::string> why_gone(int rank) override { return world_.why_gone(rank); }

 private:
  comm::World world_;
  std::string key_;
};

}  // namespace penstock::checkpoint
