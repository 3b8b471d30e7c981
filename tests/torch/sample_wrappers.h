// Two small tensor subclasses for tests and benchmarks.
#pragma once

#include "penstock/tensor_subclass.h"

namespace penstock::sample {

// One inner tensor; every operator runs on it.
class Boxed final : public Payload {
 public:
  static constexpr std::string_view kKind = "Boxed";
  explicit Boxed(at::Tensor inner) : inner(std::move(inner)) {}
  static at::Tensor make(const at::Tensor& inner, const at::Tensor* viewed = nullptr) {
    return make_wrapper_like(c10::make_intrusive<Boxed>(inner), inner, viewed);
  }

  std::string_view kind() const override { return kKind; }
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
    WrapperCall<Boxed> call(op, stack);
    const Stack results = call.run([](const Boxed& boxed) { return boxed.inner; });
    call.finish(results, [](const at::Tensor& inner, ResultPlace, const at::Tensor* viewed) {
      return make(inner, viewed);
    });
  }
  std::vector<std::pair<std::string, at::Tensor>> inner_tensors() const override {
    return {{"inner", inner}};
  }

  at::Tensor inner;
};

// Two inner tensors of one shape; every operator runs on both.
class Two final : public Payload {
 public:
  static constexpr std::string_view kKind = "Two";
  Two(at::Tensor a, at::Tensor b) : a(std::move(a)), b(std::move(b)) {}
  static at::Tensor make(const at::Tensor& a, const at::Tensor& b, const at::Tensor* viewed = nullptr) {
    return make_wrapper_like(c10::make_intrusive<Two>(a, b), a, viewed);
  }

  std::string_view kind() const override { return kKind; }
  int priority() const override {
    return 1;
  }  // if a Two of Boxed tensors and a Boxed meet in one call, the Two handles it
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
    WrapperCall<Two> call(op, stack);
    const Stack first = call.run([](const Two& two) { return two.a; });
    const Stack second = call.run([](const Two& two) { return two.b; });
    call.finish(first, [&](const at::Tensor& inner, ResultPlace place, const at::Tensor* viewed) {
      return make(inner, tensor_at(second, place), viewed);
    });
  }
  std::vector<std::pair<std::string, at::Tensor>> inner_tensors() const override {
    return {{"a", a}, {"b", b}};
  }
  c10::IValue context() const override { return c10::IValue("two"); }

  at::Tensor a, b;
};

}  // namespace penstock::sample
