// One half of an overlapped unit: the forward or the backward of a schedule's unit that pairs both. While an
// exchange with other ranks is under way, a half lets the other one compute.
//
//   at::Tensor result = start_exchange(rows);
//   if (const auto half = UnitHalf::current()) {
//     half->begin_exchange();                   // the other half computes until it has an exchange itself
//     wait_for(result);
//     half->end_exchange();
//   }
//
// (functional::wait_in_turn does that.) The current half is found wherever LibTorch carries its thread-local
// state: on autograd's worker threads it is the half that called backward(), also in forwards that are
// computed again there.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

namespace penstock {

class UnitHalf {
 public:
  UnitHalf() = default;
  virtual ~UnitHalf() = default;
  UnitHalf(const UnitHalf&) = delete;
  UnitHalf& operator=(const UnitHalf&) = delete;

  // Lets the other half run; returns when it is this half's turn again. Throws if the other half has failed:
  // the exchange is then not to be waited for, since other ranks may never start it.
  virtual void begin_exchange() = 0;
  // The exchange has completed, or failed.
  virtual void end_exchange() noexcept = 0;

  // Returns null outside of overlapped halves.
  static std::shared_ptr<UnitHalf> current();
};

// Makes a half current for a scope; null: none, so that everything inside runs without interruption by the
// other half.
class UnitHalfGuard {
 public:
  explicit UnitHalfGuard(std::shared_ptr<UnitHalf> half);
  UnitHalfGuard(const UnitHalfGuard&) = delete;
  UnitHalfGuard& operator=(const UnitHalfGuard&) = delete;

 private:
  c10::DebugInfoGuard guard_;
};

}  // namespace penstock
