// Pooling, padding and resampling of images.
#include <array>
#include <tuple>

#include "penstock/torch/fake/shape_functions.h"
#include "penstock/torch/fake/shape_helpers.h"

namespace penstock::detail {
namespace {

using Two = std::tuple<Tensor, Tensor>;

// `self` with its last dimensions replaced.
Sizes with_spatial(const Tensor& self, IntArrayRef spatial) {
  TORCH_CHECK(self.dim() >= static_cast<std::int64_t>(spatial.size()), "expected an input with at least ",
              spatial.size(), " dimensions, but got sizes ", self.sizes());
  Sizes sizes(self.sizes().begin(), self.sizes().end() - static_cast<std::ptrdiff_t>(spatial.size()));
  sizes.insert(sizes.end(), spatial.begin(), spatial.end());
  return sizes;
}

// For kernels that do not support channels last in older versions.
Tensor newer_image_like(IntArrayRef sizes, const Tensor& like) {
  return PENSTOCK_TORCH_AT_LEAST(2, 0) ? image_like(sizes, like) : at::empty(sizes, like.options());
}

// ---- pooling ----

Tensor adaptive_avg_pool2d(const Tensor& self, IntArrayRef output_size) {
  return image_like(with_spatial(self, output_size), self);
}
Tensor adaptive_avg_pool3d(const Tensor& self, IntArrayRef output_size) {
  return at::empty(with_spatial(self, output_size), self.options());
}
Tensor adaptive_avg_pool2d_backward(const Tensor&, const Tensor& self) { return suggested_like(self); }
Tensor adaptive_avg_pool3d_backward(const Tensor&, const Tensor& self) { return contiguous_like(self); }

Two max_pool3d(const Tensor& self, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
               IntArrayRef dilation, bool ceil_mode) {
  Sizes spatial;
  for (std::size_t i = 0; i < 3; ++i) {
    const std::int64_t size = self.size(static_cast<std::int64_t>(i) - 3), pad = at_dim(padding, i);
    const std::int64_t step = stride.empty() ? at_dim(kernel, i) : at_dim(stride, i);
    const std::int64_t room = size + 2 * pad - at_dim(dilation, i) * (at_dim(kernel, i) - 1) - 1;
    std::int64_t out = (room + (ceil_mode ? step - 1 : 0)) / step + 1;
    if (ceil_mode && (out - 1) * step >= size + pad) --out;  // the last window must start inside the input
    TORCH_CHECK(out >= 1, "max_pool3d: the output would have a non-positive size for an input of ",
                self.sizes());
    spatial.push_back(out);
  }
  const Tensor output = newer_image_like(with_spatial(self, spatial), self);
  return {output, at::empty_like(output, output.options().dtype(at::kLong))};
}

Tensor max_pool3d_backward(const Tensor&, const Tensor& self, IntArrayRef, IntArrayRef, IntArrayRef,
                           IntArrayRef, bool, const Tensor&) {
  return newer_image_like(self.sizes(), self);
}

Tensor max_unpool2d(const Tensor& self, const Tensor&, IntArrayRef output_size) {
  return image_like(with_spatial(self, output_size), self);
}
Tensor max_unpool3d(const Tensor& self, const Tensor&, IntArrayRef output_size, IntArrayRef, IntArrayRef) {
  return at::empty(with_spatial(self, output_size), self.options());
}

// ---- padding ----

Tensor reflection_pad2d(const Tensor& self, IntArrayRef padding) {
  TORCH_CHECK(padding[0] < self.size(-1) && padding[1] < self.size(-1) && padding[2] < self.size(-2) &&
                  padding[3] < self.size(-2),
              "Padding size should be less than the corresponding input dimension, but got: padding ",
              padding, " for an input of ", self.sizes());
  return newer_image_like(
      with_spatial(self, {self.size(-2) + padding[2] + padding[3], self.size(-1) + padding[0] + padding[1]}),
      self);
}

Tensor reflection_pad_backward(const Tensor&, const Tensor& self, IntArrayRef) {
  return newer_image_like(self.sizes(), self);
}
Tensor replication_pad_backward(const Tensor&, const Tensor& self, IntArrayRef) {
  return suggested_like(self);
}

// ---- resampling ----

Sizes scaled(IntArrayRef input, at::OptionalIntArrayRef output_size,
             const c10::optional<at::ArrayRef<double>>& factors) {
  if (output_size.has_value()) return Sizes(output_size->begin(), output_size->end());
  TORCH_CHECK(factors.has_value(), "Must specify exactly one of output_size and scale_factors");
  Sizes sizes;
  for (std::size_t i = 0; i < factors->size(); ++i)
    sizes.push_back(static_cast<std::int64_t>(static_cast<double>(input[i + 2]) * (*factors)[i]));
  return sizes;
}

Tensor upsample3d(const Tensor& self, at::OptionalIntArrayRef output_size,
                  c10::optional<at::ArrayRef<double>> factors) {
  return image_like(with_spatial(self, scaled(self.sizes(), output_size, factors)), self);
}

Tensor upsample3d_backward(const Tensor& grad, at::OptionalIntArrayRef, IntArrayRef input_size,
                           c10::optional<at::ArrayRef<double>>) {
  return image_like(input_size, grad);
}

// LibTorch's composite kernels for these return views where the real ones copy.
Tensor pixel_shuffle(const Tensor& self, std::int64_t factor) {
  TORCH_CHECK(self.dim() >= 3 && factor > 0 && self.size(-3) % (factor * factor) == 0,
              "pixel_shuffle expects its input's 'channel' dimension to be ",
              "divisible by the square of upscale_factor, but input.sizes() is ", self.sizes(),
              " and the factor ", factor);
  const Sizes sizes =
      with_spatial(self, {self.size(-3) / (factor * factor), self.size(-2) * factor, self.size(-1) * factor});
  return image_like(sizes, self);
}
Tensor pixel_unshuffle(const Tensor& self, std::int64_t factor) {
  TORCH_CHECK(self.dim() >= 3 && factor > 0 && self.size(-1) % factor == 0 && self.size(-2) % factor == 0,
              "pixel_unshuffle expects height and ",
              "width to be divisible by downscale_factor, but input.sizes() is ", self.sizes(),
              " and the factor ", factor);
  return image_like(
      with_spatial(self, {self.size(-3) * factor * factor, self.size(-2) / factor, self.size(-1) / factor}),
      self);
}

Tensor grid_sampler(const Tensor& input, const Tensor& grid, std::int64_t, std::int64_t, bool) {
  Sizes sizes = {input.size(0), input.size(1)};
  for (std::int64_t i = 1; i + 1 < grid.dim(); ++i) sizes.push_back(grid.size(i));
  return at::empty(sizes, input.options());
}

Two grid_sampler_backward(const Tensor&, const Tensor& input, const Tensor& grid, std::int64_t, std::int64_t,
                          bool, std::array<bool, 2> mask) {
  return {mask[0] ? contiguous_like(input) : Tensor(), contiguous_like(grid)};
}

}  // namespace

void add_pooling_shapes() {
  register_where_missing("aten::_adaptive_avg_pool2d", adaptive_avg_pool2d);
  register_where_missing("aten::_adaptive_avg_pool2d_backward", adaptive_avg_pool2d_backward);
  register_where_missing("aten::_adaptive_avg_pool3d", adaptive_avg_pool3d);
  register_where_missing("aten::_adaptive_avg_pool3d_backward", adaptive_avg_pool3d_backward);
  register_where_missing("aten::max_pool3d_with_indices", max_pool3d);
  register_where_missing("aten::max_pool3d_with_indices_backward", max_pool3d_backward);
  register_where_missing("aten::max_unpool2d", max_unpool2d);
  register_where_missing("aten::max_unpool3d", max_unpool3d);
  register_where_missing("aten::reflection_pad2d", reflection_pad2d);
  register_where_missing("aten::reflection_pad2d_backward", reflection_pad_backward);
  for (const char* op : {"aten::replication_pad2d_backward", "aten::replication_pad3d_backward"})
    register_where_missing(op, replication_pad_backward);
  for (const char* op : {"aten::upsample_nearest3d.vec", "aten::_upsample_nearest_exact3d.vec"})
    register_where_missing(op, upsample3d);
  for (const char* op :
       {"aten::upsample_nearest3d_backward.vec", "aten::_upsample_nearest_exact3d_backward.vec"})
    register_where_missing(op, upsample3d_backward);
  register_shape_function("aten::pixel_shuffle", pixel_shuffle);
  register_shape_function("aten::pixel_unshuffle", pixel_unshuffle);
  for (const char* op : {"aten::grid_sampler_2d", "aten::grid_sampler_3d"})
    register_where_missing(op, grid_sampler);
  for (const char* op : {"aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward"})
    register_where_missing(op, grid_sampler_backward);
}

}  // namespace penstock::detail
