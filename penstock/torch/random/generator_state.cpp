#include "penstock/torch/random/generator_state.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"

namespace penstock {
namespace {

// LibTorch's own form of a CUDA generator's state: seed and offset, eight bytes each.
constexpr std::int64_t kPhiloxBytes = 16;

at::Tensor raw_state(const at::Generator& generator) {
  at::Generator same = generator;
  const std::lock_guard lock(same.mutex());
  return same.get_state();
}

void set_raw_state(const at::Generator& generator, const at::Tensor& state) {
  at::Generator same = generator;
  const std::lock_guard lock(same.mutex());
  same.set_state(state);
}

// Copies bytes below the dispatcher's modes and autograd.
at::Tensor copied_as(const at::Tensor& bytes, const GeneratorStateForm& form) {
  at::Tensor copy(at::detail::empty_cpu({form.numel}, form.dtype));
  PENSTOCK_INVARIANT(copy.nbytes() == bytes.nbytes(), "the state of a generator has another size");
  std::memcpy(copy.data_ptr(), bytes.data_ptr(), bytes.nbytes());
  return copy;
}

void check_state(const at::Tensor& state, const GeneratorStateForm& form, c10::DeviceType type) {
  if (state.defined() && state.device().is_cpu() && state.dim() == 1 && state.size(0) == form.numel &&
      state.scalar_type() == form.dtype && state.is_contiguous())
    return;
  throw ValueError(describe(
      fmt::format("random numbers: the state of a generator of {}", c10::DeviceTypeName(type, true)),
      state.defined() ? fmt::format("{} elements of {}", state.numel(), c10::toString(state.scalar_type()))
                      : std::string("undefined"),
      fmt::format("{} elements of {} in a row on the CPU", form.numel, c10::toString(form.dtype)),
      "pass a tensor that generator_state() has returned"));
}

at::Tensor read_state(at::Device device) { return generator_state(default_generator(device)); }
void write_state(const at::Tensor& state, at::Device device) {
  set_generator_state(default_generator(device), state);
}

}  // namespace

at::Generator default_generator(at::Device device) {
  generator_state_form(device.type());
  return at::globalContext().defaultGenerator(device);
}

GeneratorStateForm generator_state_form(c10::DeviceType type) {
  if (type == c10::DeviceType::CUDA) return {2, at::kLong};
  if (type != c10::DeviceType::CPU)
    throw NotImplemented(
        fmt::format("random numbers: the states of generators of {} have no known form; draw on the CPU or a "
                    "CUDA device",
                    c10::DeviceTypeName(type, true)));
  // Versions of LibTorch differ.
  static const std::int64_t bytes = raw_state(at::globalContext().defaultGenerator(at::kCPU)).numel();
  return {bytes, at::kByte};
}

at::Tensor generator_state(const at::Generator& generator) {
  const at::Tensor bytes = raw_state(generator);
  const c10::DeviceType type = generator.device().type();
  if (type == c10::DeviceType::CPU) return bytes;
  if (bytes.numel() != kPhiloxBytes)
    throw NotImplemented(describe("random numbers: bytes of the state of a CUDA generator",
                                  std::to_string(bytes.numel()), std::to_string(kPhiloxBytes),
                                  "use a version of LibTorch that Penstock supports"));
  return copied_as(bytes, generator_state_form(type));
}

void set_generator_state(const at::Generator& generator, const at::Tensor& state) {
  const c10::DeviceType type = generator.device().type();
  check_state(state, generator_state_form(type), type);
  set_raw_state(generator, type == c10::DeviceType::CPU
                               ? state
                               : copied_as(state, GeneratorStateForm{kPhiloxBytes, at::kByte}));
}

at::Tensor recorded_generator_state(at::Device device) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("penstock::generator_state", "")
                             .typed<at::Tensor(at::Device)>();
  return op.call(device);
}

void set_recorded_generator_state(at::Device device, const at::Tensor& state) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("penstock::set_generator_state", "")
                             .typed<void(const at::Tensor&, at::Device)>();
  op.call(state, device);
}

GeneratorStateScope::GeneratorStateScope(at::Generator generator, const at::Tensor& state)
    : generator_(std::move(generator)), before_(raw_state(generator_)) {
  set_generator_state(generator_, state);
}

GeneratorStateScope::~GeneratorStateScope() { set_raw_state(generator_, before_); }

// Tagged, so that graphs keep their order among operators that draw.
TORCH_LIBRARY_FRAGMENT(penstock, library) {
  library.def("generator_state(Device generator) -> Tensor", {at::Tag::nondeterministic_seeded});
  library.def("set_generator_state(Tensor state, Device generator) -> ()",
              {at::Tag::nondeterministic_seeded});
}
TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, library) {
  library.impl("generator_state", read_state);
  library.impl("set_generator_state", write_state);
}

}  // namespace penstock
