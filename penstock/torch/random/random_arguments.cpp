#include "penstock/torch/random/random_arguments.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/random/running_step.h"

namespace penstock::random {

namespace {

std::string text_of(at::IntArrayRef values) {
  return fmt::format("[{}]", fmt::join(values.begin(), values.end(), ", "));
}

Element element_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return Element::Float32;
    case at::kDouble:
      return Element::Float64;
    case at::kBFloat16:
      return Element::BFloat16;
    case at::kHalf:
      return Element::Float16;
    default:
      break;
  }
  PENSTOCK_INVARIANT(dtype == at::kBool, "the dtype has been checked");
  return Element::Bool;
}

philox::Stream stream_of(at::IntArrayRef given) {
  const std::array<std::int64_t, 5> key = completed(given);
  const auto part = [&](std::size_t i) { return static_cast<u64>(key[i]); };
  return philox::derive(part(0), part(1), part(2), part(3), part(4));
}

// A dim with the strides that a walk follows.
struct Dim {
  std::int64_t size, global_stride, out_stride, in_stride;
};

bool continues(const Dim& outer, const Dim& inner) {
  return outer.global_stride == inner.global_stride * inner.size &&
         outer.out_stride == inner.out_stride * inner.size && outer.in_stride == inner.in_stride * inner.size;
}

BoxWalk make_walk(const DrawArguments& given, const at::Tensor& out, const at::Tensor& in,
                  std::int64_t per_block) {
  const at::IntArrayRef shape = given.global_shape.empty() ? out.sizes() : given.global_shape;
  BoxWalk walk;
  std::vector<Dim> dims;  // from the innermost
  std::int64_t global_stride = 1;
  for (std::int64_t d = out.dim() - 1; d >= 0; --d) {
    const auto i = static_cast<std::size_t>(d);
    const Dim dim{out.size(d), global_stride, out.stride(d), in.defined() ? in.stride(d) : out.stride(d)};
    if (!given.offset.empty()) walk.start += given.offset[i] * global_stride;
    global_stride *= shape[i];
    if (dim.size == 1) continue;
    if (dims.empty() && dim.global_stride != 1) dims.push_back({1, 1, 1, 1});  // rows of one element
    if (!dims.empty() && continues(dim, dims.back())) {
      dims.back().size *= dim.size;
    } else {
      dims.push_back(dim);
    }
  }
  if (dims.empty()) dims.push_back({1, 1, 1, 1});
  if (dims.size() > BoxWalk::kMaxDims)
    throw ValueError(describe(
        fmt::format("{}: dims that cannot be merged in the global shape and in memory", given.operation),
        fmt::format("{}", dims.size()), fmt::format("at most {}", int{BoxWalk::kMaxDims}),
        "pass a contiguous tensor, or a box that covers the inner dims completely"));
  walk.dims = static_cast<int>(dims.size());
  walk.rows = 1;
  bool same_phase = true;  // every row starts at the same position within a block
  for (std::size_t d = 0; d < dims.size(); ++d) {
    walk.size[d] = dims[d].size;
    walk.global_stride[d] = dims[d].global_stride;
    walk.out_stride[d] = dims[d].out_stride;
    walk.in_stride[d] = dims[d].in_stride;
    if (d == 0) continue;
    walk.rows *= dims[d].size;
    same_phase = same_phase && dims[d].global_stride % per_block == 0;
  }
  const std::int64_t phase = same_phase ? walk.start % per_block : per_block - 1;
  walk.blocks_per_row = (phase + walk.size[0] + per_block - 1) / per_block;
  if (out.numel() == 0) walk.rows = 0;
  return walk;
}

}  // namespace

void check_draw_arguments(const DrawArguments& given, at::IntArrayRef sizes) {
  if (given.key.size() != 5)
    throw ValueError(describe(fmt::format("{}: key", given.operation), text_of(given.key),
                              "five integers: seed, step, microbatch, layer, purpose"));
  if (given.global_shape.empty() && given.offset.empty()) return;
  if (given.global_shape.size() != sizes.size() || given.offset.size() != sizes.size())
    throw ValueError(describe(
        fmt::format("{}: box", given.operation),
        fmt::format("global shape {}, offset {}", text_of(given.global_shape), text_of(given.offset)),
        fmt::format("{} numbers each, one for each dim of the tensor", sizes.size()),
        "pass both, or neither if the tensor is the whole global tensor"));
  std::int64_t elements = 1;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    const std::int64_t global = given.global_shape[d], offset = given.offset[d];
    if (waits_for_rows(global, offset)) continue;  // shapes only: a kernel gets a completed box
    if (offset < 0 || global < 0 || offset > global || sizes[d] > global - offset)
      throw ValueError(describe(fmt::format("{}: box in dim {}", given.operation, d),
                                fmt::format("offset {} and size {}", offset, sizes[d]),
                                fmt::format("a part of the global size {}", global),
                                "pass the offset and the global shape of this tensor"));
    if (global > 0 && __builtin_mul_overflow(elements, global, &elements))
      throw ValueError(describe(fmt::format("{}: global shape", given.operation), text_of(given.global_shape),
                                "fewer than 2^63 elements"));
  }
}

void check_dtype(const DrawArguments& given, Kind kind, at::ScalarType dtype, bool in_double) {
  const bool floating =
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
  if (!floating && !(kind == Kind::Bernoulli && dtype == at::kBool))
    throw TypeError(describe(fmt::format("{}: dtype", given.operation), at::toString(dtype),
                             kind == Kind::Bernoulli ? "float32, float64, bfloat16, float16 or bool"
                                                     : "float32, float64, bfloat16 or float16"));
  if (in_double && dtype != at::kDouble)
    throw TypeError(describe(fmt::format("{}: dtype of a draw in double precision", given.operation),
                             at::toString(dtype), "float64", "draw in single precision"));
}

RandomJob make_job(const DrawArguments& given, Kind kind, const AnyConstants& constants,
                   const at::Tensor& out, const at::Tensor& in) {
  RandomJob job;
  job.kind = kind;
  job.element = element_of(out.scalar_type());
  job.constants = constants;
  job.stream = stream_of(given.key);
  const std::int64_t per_block =
      std::holds_alternative<Constants<double, u64>>(constants) ? kPerBlock<u64> : kPerBlock<u32>;
  job.walk = make_walk(given, out, in, per_block);
  job.out = out.data_ptr();
  job.in = in.defined() ? in.data_ptr() : nullptr;
  return job;
}

}  // namespace penstock::random
