// Observes every operator of a trial run on real tensors, so that the run leaves no changes in tensors that
// are not registered.
//
// - The values of a tensor that existed before are saved before its first write, and restored at the end.
// - A tensor that the run made and that outlives it is correct if a real run would have made the same. It is
//   wrong if it was computed from a stand-in (zeros for activations and for sharded parameters), or from a
//   tensor that no longer exists: then it is the next state of something (`count = count + 1`), and a real
//   run must not find that state advanced.
// Kernels that write arguments which their schema declares read-only (running statistics of normalization)
// are not observed; buffers are copied anyway (trial_scope.h).
// Thread safety: a mode; autograd's worker threads may call it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <mutex>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "penstock/mode.h"

namespace penstock {

class TrialWatch final : public Mode {
 public:
  // `registered` are parameters and buffers, which the trial keeps unchanged.
  explicit TrialWatch(const std::vector<at::Tensor>& registered);

  // Marks a tensor whose values are not those of a real run.
  void add_stand_in(const at::Tensor& tensor);
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override;

  // Call after the run, when everything that belongs to it has been released.
  void put_back();
  std::vector<at::Tensor> wrong_survivors() const;

 private:
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct Made {
    WeakStorage storage;
    bool from_stand_in = false;
    std::set<const void*> origins;  // storages that existed before the run
  };
  struct Saved {
    c10::Storage storage;
    at::Tensor bytes;
  };
  const Made* find_made(const at::Tensor& part) const;
  void add_sources(const at::Tensor& part, Made& sources);
  void save(const at::Tensor& part);
  void note_made(const at::Tensor& part, const Made& sources);
  bool is_wrong(const Made& made) const;

  mutable std::mutex mutex_;
  std::unordered_set<const void*> registered_;
  std::unordered_map<const void*, WeakStorage> before_;  // storages that existed before the run and were read
  std::unordered_map<const void*, Made> made_;
  std::unordered_map<const void*, Saved> saved_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> tensors_;
};

}  // namespace penstock
