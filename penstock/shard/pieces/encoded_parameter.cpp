#include "penstock/shard/pieces/encoded_parameter.h"

#include <ATen/ATen.h>

#include <c10/util/accumulate.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/operator_traits.h"
#include "penstock/shard/layout/shard_layout.h"
#include "penstock/shard/pieces/piece_copy.h"
#include "penstock/tensor_subclass.h"
#include "penstock/torch/dispatch/any_operator_hook.h"

namespace penstock {
namespace {

ShardLayout layout_of(const GatheredBytes& bytes) {
  return {bytes.shape, bytes.dim, static_cast<int>(bytes.rows.size(0))};
}

class EncodedParameter final : public Payload {
 public:
  static constexpr std::string_view kKind = "EncodedParameter";

  // `geometry`: of the parameter, or of a view of it.
  EncodedParameter(GatheredBytes bytes, WrapperGeometry geometry)
      : bytes_(std::move(bytes)), geometry_(std::move(geometry)) {}

  static at::Tensor make(const GatheredBytes& bytes, const WrapperGeometry& geometry,
                         const at::Tensor* viewed = nullptr) {
    return make_wrapper(c10::make_intrusive<EncodedParameter>(bytes, geometry), geometry, viewed);
  }

  std::string_view kind() const override { return kKind; }
  std::vector<std::pair<std::string, at::Tensor>> inner_tensors() const override {
    return {{"bytes", bytes_.rows}};
  }

  void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
    const NoAnyHookGuard no_hook;
    const OperatorTraits& traits = traits_of(op);
    if (traits.pure_view) return view(op, traits, stack);
    const std::size_t base = stack->size() - traits.arguments.size();
    for (std::size_t i = 0; i < traits.arguments.size(); ++i)
      if (traits.arguments[i].written)
        for_each_tensor((*stack)[base + i], [&](const at::Tensor& tensor) {
          if (payload_as<EncodedParameter>(tensor))
            refuse(op,
                   "a parameter that is gathered in encoded form cannot be written; write its shard "
                   "(ensure_sharded, load_whole)");
        });
    map_arguments(op, stack, [](const at::Tensor& tensor) {
      const EncodedParameter* encoded = payload_as<EncodedParameter>(tensor);
      return encoded ? encoded->value() : tensor;
    });
    op.callBoxed(stack);
  }

 private:
  at::Tensor value() const {
    const at::Tensor whole = decode_gathered(bytes_);
    return whole.as_strided(geometry_.sizes, geometry_.strides, geometry_.storage_offset);
  }

  // A tensor without memory and with the geometry of this one.
  at::Tensor shape_only() const {
    return at::empty({c10::multiply_integers(bytes_.shape)},
                     at::TensorOptions(geometry_.dtype).device(at::kMeta))
        .as_strided(geometry_.sizes, geometry_.strides, geometry_.storage_offset);
  }

  void view(const c10::OperatorHandle& op, const OperatorTraits& traits, Stack* stack) const {
    const std::size_t base = stack->size() - traits.arguments.size();
    const at::Tensor viewed =
        (*stack)[base + static_cast<std::size_t>(traits.returns.front().argument)].toTensor();
    map_arguments(op, stack, [](const at::Tensor& tensor) {
      const EncodedParameter* encoded = payload_as<EncodedParameter>(tensor);
      return encoded ? encoded->shape_only() : tensor;
    });
    op.callBoxed(stack);
    for (std::size_t i = stack->size() - traits.returns.size(); i < stack->size(); ++i)
      (*stack)[i] = map_tensors((*stack)[i], [&](const at::Tensor& shaped) {
        if (shaped.scalar_type() != geometry_.dtype)
          refuse(op,
                 "a view with a different dtype needs the parameter's decoded memory; call clone() first");
        WrapperGeometry geometry = geometry_of(shaped);
        geometry.device = geometry_.device;
        return make(bytes_, geometry, &viewed);
      });
  }

  const GatheredBytes bytes_;
  const WrapperGeometry geometry_;
};

}  // namespace

at::Tensor AllGatherExtension::make_gathered(const GatheredBytes& bytes) const {
  return make_encoded_parameter(bytes);
}

at::Tensor make_encoded_parameter(const GatheredBytes& bytes) {
  WrapperGeometry geometry;
  geometry.sizes.assign(bytes.shape.begin(), bytes.shape.end());
  geometry.strides.resize(geometry.sizes.size(), 1);
  for (std::size_t i = geometry.sizes.size(); i-- > 1;)
    geometry.strides[i - 1] = geometry.strides[i] * std::max<std::int64_t>(geometry.sizes[i], 1);
  geometry.dtype = bytes.dtype;
  geometry.device = bytes.rows.device();
  return EncodedParameter::make(bytes, geometry);
}

bool is_encoded_parameter(const at::Tensor& tensor) {
  return payload_as<EncodedParameter>(tensor) != nullptr;
}

at::Tensor decode_gathered(const GatheredBytes& bytes) {
  const at::TensorOptions options = at::TensorOptions(bytes.dtype).device(bytes.rows.device());
  const ShardLayout layout = layout_of(bytes);
  const at::Tensor pieces = at::empty({bytes.rows.size(0), layout.padded_numel()}, options),
                   whole = at::empty(bytes.shape, options);
  for (std::int64_t rank = 0; rank < bytes.rows.size(0); ++rank)
    bytes.extension->decode(bytes.rows.select(0, rank), pieces.select(0, rank));
  join_pieces(pieces, 0, layout, whole);
  return whole;
}

}  // namespace penstock
