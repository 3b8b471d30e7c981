// The payload of a fake tensor. Private to this folder.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "penstock/fake.h"
#include "penstock/tensor_subclass.h"
#include "penstock/torch/fake/fake_note.h"

namespace penstock::detail {

class FakePayload final : public Payload {
 public:
  static constexpr std::string_view kKind = "Fake";
  FakePayload(at::Tensor meta, at::Device device) : meta(std::move(meta)), device(device) {}

  std::string_view kind() const override { return kKind; }
  int priority() const override { return -100; }  // any other subclass handles a mixed call first
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override;

  at::Tensor meta;    // the same geometry on the meta device; views share its storage
  at::Device device;  // the device of the corresponding real tensor

  // Two kinds of values are known, because LibTorch's own formulas need them. First, an integer that fill_
  // wrote last, by which composite kernels pass a number (repeat_interleave with a count). Valid while
  // `version` equals the tensor's version, which every write increments.
  struct Filled {
    std::int64_t value;
    std::uint32_t version;
  };
  std::optional<Filled> filled;
  // Second, where a real tensor equals a number, evaluated under the mode (the backward of prod looks for
  // zeros). Computed only when needed.
  struct Compared {
    at::Tensor real;
    at::Scalar number;
    std::uint32_t version;
  };
  std::unique_ptr<Compared> compared;

  FakeNote note;

  // Why real operators must reject this tensor, if it outlived a trial run (fake_watch.h).
  std::shared_ptr<const std::string> leftover;
};

// Returns the fake tensor around a meta tensor. `viewed`: as for make_wrapper.
at::Tensor wrap_meta(const at::Tensor& meta, at::Device device, const at::Tensor* viewed = nullptr);

// Runs one operator in shape only. `mode` is null if only an argument is fake.
void fake_call(const c10::OperatorHandle& op, Stack* stack, FakeMode* mode);

// How an operator is run in shape only.
struct FakeRule {
  enum class Kind : std::uint8_t {
    Shape,          // a registered shape function
    Meta,           // LibTorch's kernel for the meta device, or a composite one over it
    Decompose,      // a composite kernel that needs operators without a meta kernel: run it on fake tensors
    DataDependent,  // refuse
    Missing         // refuse: its shape is unknown
  };
  Kind kind = Kind::Missing;
  bool mixes_devices = false;  // copies and indexing may have arguments on several devices
  bool composite = false;      // has a kernel made of other operators
  bool fills = false;          // fill_ with a number
  bool compares = false;       // == with a number
  const c10::KernelFunction* shape = nullptr;
};

const FakeRule& fake_rule(const c10::OperatorHandle& op);
// Records that the composite kernel of `op` cannot run on meta tensors.
void mark_for_decomposition(const c10::OperatorHandle& op);

}  // namespace penstock::detail
