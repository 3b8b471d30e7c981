// Convolutions of any number of dimensions, and related operators.
#include <array>
#include <tuple>

#include "penstock/torch/fake/shape_functions.h"
#include "penstock/torch/fake/shape_helpers.h"

namespace penstock::detail {
namespace {

using Three = std::tuple<Tensor, Tensor, Tensor>;

// The memory format that the kernels use: channels last if the input or the weight is. Older CPU kernels
// support it for plain convolutions only.
at::MemoryFormat convolution_format(const Tensor& input, const Tensor& weight, bool transposed) {
  const auto either = [&](at::MemoryFormat format) {
    return input.suggest_memory_format() == format || weight.suggest_memory_format() == format;
  };
  if (!shape_device().is_cuda() && !PENSTOCK_TORCH_AT_LEAST(2, 0) && transposed)
    return at::MemoryFormat::Contiguous;
  if (weight.dim() == 4 && either(at::MemoryFormat::ChannelsLast)) return at::MemoryFormat::ChannelsLast;
  if (weight.dim() == 5 && either(at::MemoryFormat::ChannelsLast3d)) return at::MemoryFormat::ChannelsLast3d;
  return at::MemoryFormat::Contiguous;
}

Sizes convolved_sizes(const Tensor& input, const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
                      IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                      std::int64_t groups) {
  const std::int64_t channels = transposed ? weight.size(0) : weight.size(1) * groups;
  TORCH_CHECK(input.size(1) == channels, "Given groups=", groups, ", weight of size ", weight.sizes(),
              ", expected input", input.sizes(), " to have ", channels, " channels, but got ", input.size(1),
              " channels instead");
  Sizes sizes = {input.size(0), transposed ? weight.size(1) * groups : weight.size(0)};
  for (std::size_t i = 0; i + 2 < static_cast<std::size_t>(input.dim()); ++i) {
    const auto dim = static_cast<std::int64_t>(i) + 2;
    const std::int64_t reach = at_dim(dilation, i) * (weight.size(dim) - 1);
    const std::int64_t step = at_dim(stride, i), pad = at_dim(padding, i);
    TORCH_CHECK(step > 0, "non-positive stride is not supported");
    if (transposed) {
      sizes.push_back((input.size(dim) - 1) * step - 2 * pad + reach + at_dim(output_padding, i) + 1);
    } else {
      TORCH_CHECK(input.size(dim) + 2 * pad >= reach + 1, "Calculated padded input size per channel: (",
                  input.size(dim) + 2 * pad, "). Kernel size: (", reach + 1,
                  "). Kernel size can't be greater than actual input size");
      sizes.push_back((input.size(dim) + 2 * pad - reach - 1) / step + 1);
    }
  }
  return sizes;
}

// One dimension runs as two with a height of 1.
bool runs_as_2d(const Tensor& input) { return input.dim() == 3; }

Tensor allocate(IntArrayRef sizes, const Tensor& like, at::MemoryFormat format, bool as_2d) {
  if (!as_2d) return at::empty(sizes, like.options(), format);
  const Sizes with_height = {sizes[0], sizes[1], 1, sizes[2]};
  return at::empty(with_height, like.options(), format).squeeze(2);
}

at::MemoryFormat format_of(const Tensor& input, const Tensor& weight, bool transposed) {
  return runs_as_2d(input) ? convolution_format(input.unsqueeze(2), weight.unsqueeze(2), transposed)
                           : convolution_format(input, weight, transposed);
}

Tensor convolution(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   std::int64_t groups) {
  TORCH_CHECK(input.dim() == weight.dim(), "Expected ", weight.dim(), "-dimensional input for ", weight.dim(),
              "-dimensional weight ", weight.sizes(), ", but got ", input.dim(),
              "-dimensional input of size ", input.sizes(), " instead");
  TORCH_CHECK(!given(bias) || bias->size(0) == (transposed ? weight.size(1) * groups : weight.size(0)),
              "Given weight of size ", weight.sizes(),
              ", expected bias to be 1-dimensional, but got bias of size ", bias->sizes(), " instead");
  TORCH_CHECK(input.scalar_type() == weight.scalar_type(), "Input type (", input.toString(),
              ") and weight type (", weight.toString(), ") should be the same");
  const Sizes sizes =
      convolved_sizes(input, weight, stride, padding, dilation, transposed, output_padding, groups);
  return allocate(sizes, input, format_of(input, weight, transposed), runs_as_2d(input));
}

Three convolution_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                           at::OptionalIntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, bool transposed,
                           IntArrayRef, std::int64_t, std::array<bool, 3> mask) {
  const at::MemoryFormat format = format_of(input, weight, transposed);
  const bool as_2d = runs_as_2d(input);
  return {mask[0] ? allocate(input.sizes(), input, format, as_2d) : Tensor(),
          mask[1] ? allocate(weight.sizes(), weight, format, as_2d) : Tensor(),
          mask[2] ? at::empty({grad_output.size(1)}, grad_output.options()) : Tensor()};
}

// ---- columns ----

std::int64_t blocks(std::int64_t size, std::int64_t kernel, std::int64_t dilation, std::int64_t padding,
                    std::int64_t stride) {
  return (size + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
}

Tensor im2col(const Tensor& self, IntArrayRef kernel, IntArrayRef dilation, IntArrayRef padding,
              IntArrayRef stride) {
  const std::int64_t height = blocks(self.size(-2), kernel[0], dilation[0], padding[0], stride[0]);
  const std::int64_t width = blocks(self.size(-1), kernel[1], dilation[1], padding[1], stride[1]);
  TORCH_CHECK(height >= 1 && width >= 1, "Given input with spatial size (", self.size(-2), ", ",
              self.size(-1), "), the array of sliding blocks has a component with a non-positive size");
  Sizes sizes = {self.size(-3) * kernel[0] * kernel[1], height * width};
  if (self.dim() == 4) sizes.insert(sizes.begin(), self.size(0));
  return at::empty(sizes, self.options());
}

Tensor col2im(const Tensor& self, IntArrayRef output_size, IntArrayRef kernel, IntArrayRef, IntArrayRef,
              IntArrayRef) {
  Sizes sizes = {self.size(-2) / (kernel[0] * kernel[1]), output_size[0], output_size[1]};
  if (self.dim() == 3) sizes.insert(sizes.begin(), self.size(0));
  return at::empty(sizes, self.options());
}

Tensor channel_shuffle(const Tensor& self, std::int64_t) { return suggested_like(self); }

}  // namespace

void add_convolution_shapes() {
  // Composite, but their kernels choose a backend by device, and the meta device has none.
  register_shape_function("aten::convolution", convolution);
  register_shape_function("aten::convolution_overrideable", convolution);
  register_shape_function("aten::convolution_backward", convolution_backward);
  register_where_missing("aten::im2col", im2col);
  register_where_missing("aten::col2im", col2im);
  register_where_missing("aten::channel_shuffle", channel_shuffle);
}

}  // namespace penstock::detail
