#include "penstock/graph/wrap/inputs_wrapper.h"

#include <utility>

#include "penstock/graph/wrap/result_view.h"

namespace penstock::graph {

Call InputsWrapper::around(Call inner, const ViewAndMutationMeta& outer) const {
  return [self = shared_from_this(), inner = std::move(inner), outer](const Values& inputs,
                                                                      const CallSizes& sizes) {
    Values outputs = inner(self->inner_inputs(inputs), sizes);
    // An input that was written through another tensor of its memory gets its gradient function lazily, when
    // it is queried, and looks like a leaf until then.
    for (std::size_t i = 0; i < inputs.size(); ++i)
      if (outer.inputs[i].mutates_data && outer.inputs[i].is_tensor) inputs[i].toTensor().grad_fn();
    restore_input_aliases(outputs, inputs, outer, sizes.get());
    return outputs;
  };
}

}  // namespace penstock::graph
