// Pooling, resampling and padding of sequences, images and volumes by name, forward and backward, against one
// process.
#include <gtest/gtest.h>

#include "tests/dtensor/operator_call.h"
#include "tests/dtensor/rule_checker.h"

namespace penstock::test {
namespace rules_image_test {

using Sizes = std::vector<std::int64_t>;

// All rows whose operator this LibTorch has, on one input.
void check_all(const std::string& name, const at::Tensor& input, const std::vector<OperatorRow>& rows) {
  for (const OperatorRow& row : rows) {
    if (!has_operator("aten::" + row.name)) continue;
    check_rule({.name = name + ": " + row.name,
                .inputs = {input},
                .body =
                    [&row](const Tensors& in) {
                      const Tensors all = call_operator("aten::" + row.name, in, row.named);
                      return Tensors{all[0]};  // positions of maxima are not differentiable
                    },
                .rtol = 1e-4,
                .atol = 1e-5,
                .most = 6});
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(ImageRules, Sequences) {
  check_all("sequences", sample({3, 2, 6}),
            {{"upsample_nearest1d", {{"output_size", Sizes{9}}}},
             {"_upsample_nearest_exact1d", {{"output_size", Sizes{9}}}},
             {"upsample_linear1d", {{"output_size", Sizes{8}}, {"align_corners", false}}},
             {"reflection_pad1d", {{"padding", Sizes{2, 1}}}},
             {"replication_pad1d", {{"padding", Sizes{1, 2}}}},
             {"avg_pool1d", {{"kernel_size", Sizes{2}}}},
             {"adaptive_max_pool1d", {{"output_size", Sizes{3}}}},
             {"max_pool1d_with_indices", {{"kernel_size", Sizes{2}}}}});
}

TEST(ImageRules, Images) {
  const Sizes larger{6, 5}, smaller{2, 3};
  check_all("images", sample({3, 2, 4, 4}),
            {{"max_pool2d_with_indices", {{"kernel_size", Sizes{2, 2}}}},
             {"avg_pool2d", {{"kernel_size", Sizes{2, 2}}}},
             {"_adaptive_avg_pool2d", {{"output_size", smaller}}},
             {"adaptive_max_pool2d", {{"output_size", smaller}}},
             {"upsample_nearest2d", {{"output_size", larger}}},
             {"_upsample_nearest_exact2d", {{"output_size", larger}}},
             {"upsample_bilinear2d", {{"output_size", larger}, {"align_corners", true}}},
             {"upsample_bicubic2d", {{"output_size", larger}, {"align_corners", false}}},
             {"_upsample_bilinear2d_aa", {{"output_size", smaller}, {"align_corners", false}}},
             {"_upsample_bicubic2d_aa", {{"output_size", smaller}, {"align_corners", false}}},
             {"reflection_pad2d", {{"padding", Sizes{1, 1, 2, 0}}}},
             {"replication_pad2d", {{"padding", Sizes{1, 1, 2, 0}}}}});
}

TEST(ImageRules, Volumes) {
  const Sizes larger{3, 4, 5}, smaller{1, 2, 2};
  check_all("volumes", sample({2, 3, 2, 3, 4}),
            {{"max_pool3d_with_indices", {{"kernel_size", Sizes{2, 2, 2}}}},
             {"avg_pool3d", {{"kernel_size", Sizes{2, 2, 2}}}},
             {"_adaptive_avg_pool3d", {{"output_size", smaller}}},
             {"adaptive_max_pool3d", {{"output_size", smaller}}},
             {"upsample_nearest3d", {{"output_size", larger}}},
             {"_upsample_nearest_exact3d", {{"output_size", larger}}},
             {"upsample_trilinear3d", {{"output_size", larger}, {"align_corners", false}}},
             {"reflection_pad3d", {{"padding", Sizes{1, 1, 2, 0, 1, 0}}}},
             {"replication_pad3d", {{"padding", Sizes{1, 1, 2, 0, 1, 0}}}}});
}

TEST(ImageRules, ChannelsAndPixels) {
  check_all("images", sample({3, 4, 2, 4}),
            {{"pixel_shuffle", {{"upscale_factor", 2}}}, {"pixel_unshuffle", {{"downscale_factor", 2}}}});
  // Not differentiable in every LibTorch.
  check_rule(each_of("images forward", {sample({3, 4, 2, 4})},
                     {{"channel_shuffle", {{"groups", 2}}}, {"native_channel_shuffle", {{"groups", 2}}}}, 6));
}

}  // namespace rules_image_test
}  // namespace penstock::test
