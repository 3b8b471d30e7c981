// Sees every operator of a trial run on real tensors, so that the run leaves nothing behind in tensors that nobody has registered.
//
// - The values of a tensor that was there before are saved before its first write, and put back at the end.
// - A tensor that the run made and somebody keeps is right if a real run would have made the same. It would not if the tensor was computed from a
//   stand-in (zeros for activations and for sharded parameters), or from a tensor that is gone since: then it is the next state of something
//   (`count = count + 1`), which a real run must not find advanced.
// Kernels that write what their schema says they read (running statistics of normalization) are not seen: buffers are copied anyway (trial_scope.h).
// Thread rule: a mode; autograd's worker threads may call it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <mutex>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "penstock/mode.h"

namespace penstock::pipeline {

class TrialWatch final : public Mode {
 public:
  // `registered`: parameters and buffers, which the trial keeps unchanged.
  explicit TrialWatch(const std::vector<at::Tensor>& registered);

  // A tensor whose values are not those of a real run.
  void add_stand_in(const at::Tensor& tensor);
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override;

  // After the run, when what belongs to it has been let go.
  void put_back();
  std::vector<at::Tensor> wrong_survivors() const;

 private:
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct Made {
    WeakStorage storage;
    bool from_stand_in = false;
    std::set<const void*> origins;  // storages that were there before
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
  std::unordered_map<const void*, WeakStorage> before_;  // storages that were there before and were read
  std::unordered_map<const void*, Made> made_;
  std::unordered_map<const void*, Saved> saved_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> tensors_;
};

}  // namespace penstock::pipeline
