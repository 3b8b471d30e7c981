#include "penstock/pipeline/infer/plan_key.h"

#include <ATen/ATen.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/InferenceMode.h>

#include <string>

#include "penstock/dtensor.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/tree/tensor_meta.h"

namespace penstock {
namespace {

void add_value(HashBuilder& hash, const Tree& leaf) {
  hash.add(static_cast<int>(leaf.kind()));
  switch (leaf.kind()) {
    case Tree::Kind::Tensor:
      hash.add(meta_of(leaf.tensor()));
      break;
    case Tree::Kind::Bool:
      hash.add(leaf.boolean());
      break;
    case Tree::Kind::Int:
      hash.add(leaf.integer());
      break;
    case Tree::Kind::Double:
      hash.add(leaf.number());
      break;
    case Tree::Kind::String:
      hash.add(leaf.text());
      break;
    case Tree::Kind::Object:
      // For objects only the kind is known.
      hash.add(leaf.ivalue().isDevice() ? leaf.ivalue().toDevice().str() : leaf.ivalue().tagKind());
      break;
    case Tree::Kind::None:
    case Tree::Kind::Tuple:
    case Tree::Kind::List:
    case Tree::Kind::Dict:
      break;
  }
}

// Like meta_of, but cheap: there may be thousands of parameters, and their strides do not affect what stages
// exchange.
void add_state(HashBuilder& hash, const at::Tensor& tensor) {
  hash.add(static_cast<int>(tensor.scalar_type())).add(tensor.requires_grad()).add(tensor.dim());
  for (const std::int64_t size : tensor.sizes()) hash.add(size);
  if (is_dtensor(tensor)) hash.add(to_string(placements_of(tensor)));
}

}  // namespace

void add_arguments(HashBuilder& hash, const Tree& tree) {
  hash.add(TreeSpec(tree));
  for (const Tree& leaf : flatten_args(tree)) add_value(hash, leaf);
}

std::uint64_t state_key(const std::vector<PipelineStage>& stages) {
  HashBuilder hash;
  const AutocastState casts = autocast_state();
  hash.add(casts.cpu)
      .add(casts.cuda)
      .add(static_cast<int>(casts.cpu_dtype))
      .add(static_cast<int>(casts.cuda_dtype));
  hash.add(static_cast<int>(c10::get_default_dtype_as_scalartype())).add(c10::InferenceMode::is_enabled());
  for (const PipelineStage& stage : stages) {
    for (const auto& module : stage.module().modules())
      for (const auto& each : module->modules(/*include_self=*/true)) hash.add(each->is_training());
    for (const at::Tensor& parameter : stage.parameters()) add_state(hash, parameter);
    for (const at::Tensor& buffer : stage.module().buffers()) add_state(hash, buffer);
  }
  return hash.value();
}

}  // namespace penstock
