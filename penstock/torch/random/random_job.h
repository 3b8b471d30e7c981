// A request to fill one tensor with random values, ready to run on a device: what the operators of
// keyed_random.h build.
//
// The arguments have been checked, and everything that does not depend on the element is computed: the Philox
// stream, the walk over the box, the constants of the draw. Internal to penstock/torch; tests use it to run
// the same job in several ways.
#pragma once

#include <cstdint>
#include <variant>

#include "penstock/torch/random/philox_words.h"
#include "penstock/torch/random/random_constants.h"
#include "penstock/torch/random/random_kernel.h"

namespace penstock::random {

enum class Element { Float32, Float64, BFloat16, Float16, Bool };

struct RandomJob {
  Kind kind = Kind::Uniform;
  Element element = Element::Float32;
  AnyConstants constants;
  philox::Stream stream = {};
  BoxWalk walk;
  void* out = nullptr;
  const void* in = nullptr;  // dropout only
};

// Uses the threads of at::parallel_for. The path must be supported by this processor.
void run_on_cpu(const RandomJob& job, CpuPath path);

// Enqueues on the current stream of the device. Throws ConfigError in a build without CUDA.
void run_on_cuda(const RandomJob& job, int device);

// Calls visitor.operator()<kind, Real, Word, Element>() with the types of the job.
template <class Visitor>
void with_types(const RandomJob& job, Visitor&& visitor);

namespace detail {

template <Kind kind, class Real, class Word, class Visitor>
void with_element(Element element, Visitor& visitor) {
  if constexpr (sizeof(Real) == 8) {
    visitor.template operator()<kind, Real, Word, double>();
  } else {
    switch (element) {
      case Element::Float32:
        return visitor.template operator()<kind, Real, Word, float>();
      case Element::BFloat16:
        return visitor.template operator()<kind, Real, Word, BFloat16Bits>();
      case Element::Float16:
        return visitor.template operator()<kind, Real, Word, Float16Bits>();
      case Element::Float64:
        if constexpr (kind != Kind::Dropout) visitor.template operator()<kind, Real, Word, double>();
        return;
      case Element::Bool:
        if constexpr (kind == Kind::Bernoulli) visitor.template operator()<kind, Real, Word, bool>();
        return;
    }
  }
}

}  // namespace detail

template <class Visitor>
void with_types(const RandomJob& job, Visitor&& visitor) {
  std::visit(
      [&]<class Real, class Word>(const Constants<Real, Word>&) {
        if constexpr (sizeof(Real) == 8 && sizeof(Word) == 4) {
          detail::with_element<Kind::Dropout, Real, Word>(job.element, visitor);
        } else {
          switch (job.kind) {
            case Kind::Uniform:
              return detail::with_element<Kind::Uniform, Real, Word>(job.element, visitor);
            case Kind::Normal:
              return detail::with_element<Kind::Normal, Real, Word>(job.element, visitor);
            case Kind::TruncNormal:
              return detail::with_element<Kind::TruncNormal, Real, Word>(job.element, visitor);
            case Kind::Bernoulli:
              if constexpr (sizeof(Real) == 4)
                detail::with_element<Kind::Bernoulli, Real, Word>(job.element, visitor);
              return;
            case Kind::Dropout:
              if constexpr (sizeof(Real) == 4)
                detail::with_element<Kind::Dropout, Real, Word>(job.element, visitor);
              return;
          }
        }
      },
      job.constants);
}

}  // namespace penstock::random
