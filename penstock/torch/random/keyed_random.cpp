#include "penstock/random.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <functional>
#include <string>

#include "penstock/errors.h"
#include "penstock/torch/random/random_arguments.h"
#include "penstock/torch/random/running_step.h"

namespace penstock {

namespace {

using at::IntArrayRef;
using at::Tensor;
using random::AnyConstants;
using random::DrawArguments;
using random::Kind;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Ints = std::vector<std::int64_t>;

template <class Signature>
auto find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>();
}

void run(const random::RandomJob& job, const at::Device& device) {
  if (job.walk.rows == 0) return;
  if (device.is_cuda()) {
    random::run_on_cuda(job, device.index());
  } else {
    random::run_on_cpu(job, random::best_cpu_path());
  }
}

// --------------------------------------------------------------------------------- operators that fill a
// tensor

// Autograd sees a tensor overwritten by constants: the derivative with respect to its previous contents is
// zero.
struct OverwriteFunction : torch::autograd::Function<OverwriteFunction> {
  static Tensor forward(AutogradContext* context, Tensor self,
                        const std::function<void(Tensor&)>* overwrite) {
    at::AutoDispatchBelowAutograd below;
    (*overwrite)(self);
    context->mark_dirty({self});
    return self;
  }
  static variable_list backward(AutogradContext*, variable_list gradients) {
    return {at::zeros_like(gradients[0]), Tensor()};
  }
};

// All kernels of one kind of draw. Draw provides the names, the constants computed from the operator's own
// arguments, and whether float64 is requested.
template <class Draw, class... Arguments>
struct FillOperator {
  using InPlace = Tensor&(Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, Arguments...);
  using Functional = Tensor(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, Arguments...);

  static Tensor& call(Tensor& self, IntArrayRef key, IntArrayRef shape, IntArrayRef offset,
                      Arguments... arguments) {
    static const auto handle = find_operator<InPlace>(Draw::kName);
    return handle.call(self, key, shape, offset, arguments...);
  }

  static AnyConstants checked(const DrawArguments& given, const Tensor& self, Arguments... arguments) {
    random::check_draw_arguments(given, self.sizes());
    random::check_dtype(given, Draw::kKind, self.scalar_type(), Draw::in_double(arguments...));
    return Draw::constants(arguments...);
  }

  static Tensor& kernel(Tensor& self, IntArrayRef key, IntArrayRef shape, IntArrayRef offset,
                        Arguments... arguments) {
    const CompletedBox box(shape, offset);
    const DrawArguments given{Draw::kName, key, box.global_shape(), box.offset()};
    const AnyConstants constants = checked(given, self, arguments...);
    at::assert_no_internal_overlap(self);
    run(random::make_job(given, Draw::kKind, constants, self), self.device());
    return self;
  }

  static Tensor& meta(Tensor& self, IntArrayRef key, IntArrayRef shape, IntArrayRef offset,
                      Arguments... arguments) {
    checked({Draw::kName, key, shape, offset}, self, arguments...);
    return self;
  }

  // Records the write for autograd; the kernels themselves do not bump the version.
  static Tensor& in_place_or_view(Tensor& self, IntArrayRef key, IntArrayRef shape, IntArrayRef offset,
                                  Arguments... arguments) {
    {
      at::AutoDispatchBelowADInplaceOrView below;
      call(self, key, shape, offset, arguments...);
    }
    torch::autograd::impl::bump_version(self);
    return self;
  }

  static Tensor& autograd(Tensor& self, IntArrayRef key, IntArrayRef shape, IntArrayRef offset,
                          Arguments... arguments) {
    // Without derivatives there is nothing to record. Tangents of forward-mode AD take the slow path, which
    // rejects them.
    if (!(at::GradMode::is_enabled() && self.requires_grad()) && !self._fw_grad(0).defined()) {
      at::AutoDispatchBelowAutograd below;
      return call(self, key, shape, offset, arguments...);
    }
    const std::function<void(Tensor&)> overwrite = [&](Tensor& tensor) {
      call(tensor, key, shape, offset, arguments...);
    };
    OverwriteFunction::apply(self, &overwrite);
    return self;
  }

  // Returns a new tensor like self, of which only the sizes, dtype and device matter.
  static Tensor functional(const Tensor& self, IntArrayRef key, IntArrayRef shape, IntArrayRef offset,
                           Arguments... arguments) {
    Tensor result = at::empty_like(self);
    call(result, key, shape, offset, arguments...);
    return result;
  }
  static Tensor functional_autograd(const Tensor& self, IntArrayRef key, IntArrayRef shape,
                                    IntArrayRef offset, Arguments... arguments) {
    static const auto handle = find_operator<Functional>(Draw::kFunctionalName);
    at::AutoDispatchBelowAutograd below;
    return handle.call(self, key, shape, offset, arguments...);
  }
};

struct UniformDraw {
  static constexpr const char* kName = "penstock::keyed_uniform_";
  static constexpr const char* kFunctionalName = "penstock::keyed_uniform";
  static constexpr Kind kKind = Kind::Uniform;
  static AnyConstants constants(double low, double high, bool in_double) {
    return random::uniform_constants(low, high, in_double);
  }
  static bool in_double(double, double, bool in_double) { return in_double; }
};
struct NormalDraw {
  static constexpr const char* kName = "penstock::keyed_normal_";
  static constexpr const char* kFunctionalName = "penstock::keyed_normal";
  static constexpr Kind kKind = Kind::Normal;
  static AnyConstants constants(double mean, double deviation, bool in_double) {
    return random::normal_constants(mean, deviation, in_double);
  }
  static bool in_double(double, double, bool in_double) { return in_double; }
};
struct TruncNormalDraw {
  static constexpr const char* kName = "penstock::keyed_trunc_normal_";
  static constexpr const char* kFunctionalName = "penstock::keyed_trunc_normal";
  static constexpr Kind kKind = Kind::TruncNormal;
  static AnyConstants constants(double mean, double deviation, double low, double high, bool in_double) {
    return random::trunc_normal_constants(mean, deviation, low, high, in_double);
  }
  static bool in_double(double, double, double, double, bool in_double) { return in_double; }
};
struct BernoulliDraw {
  static constexpr const char* kName = "penstock::keyed_bernoulli_";
  static constexpr const char* kFunctionalName = "penstock::keyed_bernoulli";
  static constexpr Kind kKind = Kind::Bernoulli;
  static AnyConstants constants(double p) { return random::bernoulli_constants(p); }
  static bool in_double(double) { return false; }
};

using Uniform = FillOperator<UniformDraw, double, double, bool>;
using Normal = FillOperator<NormalDraw, double, double, bool>;
using TruncNormal = FillOperator<TruncNormalDraw, double, double, double, double, bool>;
using Bernoulli = FillOperator<BernoulliDraw, double>;

// ------------------------------------------------------------------------------------------------------------
// dropout

constexpr const char* kDropoutName = "penstock::keyed_dropout";

AnyConstants checked_dropout(const DrawArguments& given, const Tensor& input, double p) {
  random::check_draw_arguments(given, input.sizes());
  random::check_dtype(given, Kind::Dropout, input.scalar_type(), false);
  return random::dropout_constants(p, input.scalar_type() == at::kDouble);
}

Tensor dropout_kernel(const Tensor& input, IntArrayRef key, IntArrayRef shape, IntArrayRef offset, double p) {
  const CompletedBox box(shape, offset);
  const DrawArguments given{kDropoutName, key, box.global_shape(), box.offset()};
  const AnyConstants constants = checked_dropout(given, input, p);
  Tensor output = at::empty_like(input);
  run(random::make_job(given, Kind::Dropout, constants, output, input), input.device());
  return output;
}

Tensor dropout_meta(const Tensor& input, IntArrayRef key, IntArrayRef shape, IntArrayRef offset, double p) {
  checked_dropout({kDropoutName, key, shape, offset}, input, p);
  return at::empty_like(input);
}

Tensor call_dropout(const Tensor& input, IntArrayRef key, IntArrayRef shape, IntArrayRef offset, double p) {
  static const auto handle = find_operator<decltype(dropout_kernel)>(kDropoutName);
  return handle.call(input, key, shape, offset, p);
}

// Dropout with a given mask is linear and its own transpose, so the derivative is the same operator with the
// same key.
struct DropoutFunction : torch::autograd::Function<DropoutFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& input, Ints key, Ints shape, Ints offset,
                        double p) {
    at::AutoDispatchBelowADInplaceOrView below;
    Tensor output = call_dropout(input, key, shape, offset, p);
    context->saved_data["key"] = std::move(key);
    context->saved_data["global_shape"] = std::move(shape);
    context->saved_data["offset"] = std::move(offset);
    context->saved_data["p"] = p;
    return output;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    auto& saved = context->saved_data;
    return {call_dropout(gradients[0], saved["key"].toIntVector(), saved["global_shape"].toIntVector(),
                         saved["offset"].toIntVector(), saved["p"].toDouble()),
            Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Tensor dropout_autograd(const Tensor& input, IntArrayRef key, IntArrayRef shape, IntArrayRef offset,
                        double p) {
  return DropoutFunction::apply(input, key.vec(), shape.vec(), offset.vec(), p);
}

// -------------------------------------------------------------------------------------------------------
// registration

template <class Member>
void for_each_fill(Member&& member) {
  member(Uniform{}, "keyed_uniform_", "keyed_uniform");
  member(Normal{}, "keyed_normal_", "keyed_normal");
  member(TruncNormal{}, "keyed_trunc_normal_", "keyed_trunc_normal");
  member(Bernoulli{}, "keyed_bernoulli_", "keyed_bernoulli");
}

void define(torch::Library& library, const std::string& name, const std::string& arguments) {
  const std::string key_and_box = "int[] key, int[] global_shape, int[] offset, ";
  library.def((name + "_(Tensor(a!) self, " + key_and_box + arguments + ") -> Tensor(a!)").c_str());
  library.def((name + "(Tensor self, " + key_and_box + arguments + ") -> Tensor").c_str());
}

void register_kernels(torch::Library& library) {
  for_each_fill([&]<class Fill>(Fill, const char* name, const char*) { library.impl(name, Fill::kernel); });
  library.impl("keyed_dropout", dropout_kernel);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(penstock, library) {
  define(library, "keyed_uniform", "float low, float high, bool in_double=False");
  define(library, "keyed_normal", "float mean, float std, bool in_double=False");
  define(library, "keyed_trunc_normal", "float mean, float std, float low, float high, bool in_double=False");
  define(library, "keyed_bernoulli", "float p");
  library.def("keyed_dropout(Tensor input, int[] key, int[] global_shape, int[] offset, float p) -> Tensor");
}

TORCH_LIBRARY_IMPL(penstock, CPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(penstock, CUDA, library) { register_kernels(library); }

TORCH_LIBRARY_IMPL(penstock, Meta, library) {
  for_each_fill([&]<class Fill>(Fill, const char* name, const char*) { library.impl(name, Fill::meta); });
  library.impl("keyed_dropout", dropout_meta);
}

TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, library) {
  for_each_fill([&]<class Fill>(Fill, const char*, const char* functional) {
    library.impl(functional, Fill::functional);
  });
}

TORCH_LIBRARY_IMPL(penstock, ADInplaceOrView, library) {
  for_each_fill(
      [&]<class Fill>(Fill, const char* name, const char*) { library.impl(name, Fill::in_place_or_view); });
}

TORCH_LIBRARY_IMPL(penstock, Autograd, library) {
  for_each_fill([&]<class Fill>(Fill, const char* name, const char* functional) {
    library.impl(name, Fill::autograd);
    library.impl(functional, Fill::functional_autograd);
  });
  library.impl("keyed_dropout", dropout_autograd);
}

void register_random_operators() {}

// --------------------------------------------------------------------------------------------------------
// public calls

std::vector<std::int64_t> RandomKey::to_ints() const {
  return {static_cast<std::int64_t>(seed), step, microbatch, layer, purpose};
}

std::int64_t layer_from_name(std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return static_cast<std::int64_t>(hash);
}

const Tensor& keyed_uniform_(const Tensor& tensor, const RandomKey& key, double low, double high,
                             const GlobalBox& box, Precision precision) {
  Tensor self = tensor;
  Uniform::call(self, key.to_ints(), box.global_shape, box.offset, low, high, precision == Precision::Double);
  return tensor;
}

const Tensor& keyed_normal_(const Tensor& tensor, const RandomKey& key, double mean,
                            double standard_deviation, const GlobalBox& box, Precision precision) {
  Tensor self = tensor;
  Normal::call(self, key.to_ints(), box.global_shape, box.offset, mean, standard_deviation,
               precision == Precision::Double);
  return tensor;
}

const Tensor& keyed_trunc_normal_(const Tensor& tensor, const RandomKey& key, double mean,
                                  double standard_deviation, double low, double high, const GlobalBox& box,
                                  Precision precision) {
  Tensor self = tensor;
  TruncNormal::call(self, key.to_ints(), box.global_shape, box.offset, mean, standard_deviation, low, high,
                    precision == Precision::Double);
  return tensor;
}

const Tensor& keyed_bernoulli_(const Tensor& tensor, const RandomKey& key, double p, const GlobalBox& box) {
  Tensor self = tensor;
  Bernoulli::call(self, key.to_ints(), box.global_shape, box.offset, p);
  return tensor;
}

Tensor keyed_keep_mask(const Tensor& input, double p, const RandomKey& key, const GlobalBox& box) {
  Tensor dropped = at::empty_like(input, at::kBool);
  keyed_bernoulli_(dropped, key, p, box);
  return dropped.logical_not_();
}

Tensor keyed_dropout(const Tensor& input, double p, const RandomKey& key, const GlobalBox& box) {
  return call_dropout(input, key.to_ints(), box.global_shape, box.offset, p);
}

}  // namespace penstock
