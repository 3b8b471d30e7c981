// The state of a random generator as a tensor: a value that can be kept, passed on and set again.
//
//   const at::Generator generator = default_generator(at::kCPU);
//   const at::Tensor before = generator_state(generator);
//   const at::Tensor a = at::rand({3});
//   set_generator_state(generator, before);
//   const at::Tensor b = at::rand({3});                 // equal to a
//
// The tensor is on the CPU. For a generator of the CPU it holds its bytes (uint8, about 5 KB); for one of a
// CUDA device two numbers (int64): the seed, and the offset that counts how much of its sequence was drawn.
//
// Operators of the dispatcher do the same while a graph is recorded, so that a replay reads and sets the
// state of its own run:
//   penstock::generator_state(Device generator) -> Tensor
//   penstock::set_generator_state(Tensor state, Device generator) -> ()
// Thread safety: any thread; but what other threads draw between reading a state and setting it is lost.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace penstock {

// Throws NotImplemented for a device whose generators have no state of a known form.
at::Generator default_generator(at::Device device);

at::Tensor generator_state(const at::Generator& generator);
// Throws ValueError for a tensor that is no state of such a generator.
void set_generator_state(const at::Generator& generator, const at::Tensor& state);

// What the states of the generators of a device look like.
struct GeneratorStateForm {
  std::int64_t numel = 0;
  at::ScalarType dtype = at::kByte;
};
// Does not need the device. Throws NotImplemented as default_generator() does.
GeneratorStateForm generator_state_form(c10::DeviceType type);

// The same through the dispatcher, for functions that may be recorded.
at::Tensor recorded_generator_state(at::Device device);
void set_recorded_generator_state(at::Device device, const at::Tensor& state);

// Gives a generator another state for a scope; restores the former one at the end.
class GeneratorStateScope {
 public:
  GeneratorStateScope(at::Generator generator, const at::Tensor& state);
  ~GeneratorStateScope();
  GeneratorStateScope(const GeneratorStateScope&) = delete;
  GeneratorStateScope& operator=(const GeneratorStateScope&) = delete;

  // The state after what was drawn so far.
  at::Tensor state() const { return generator_state(generator_); }

 private:
  at::Generator generator_;
  at::Tensor before_;
};

}  // namespace penstock
