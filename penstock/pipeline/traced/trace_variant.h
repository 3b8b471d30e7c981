// Traces a module for one example and mode, and finds the places at which another trace of it was cut.
//
//   PipeVariant variant = trace_variant(module, pipe, {args, kwargs}, device);
//   variant.cut = graph::cut_forward(variant.trace, variant.kinds, places);
//
// Thread safety: that of the module.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "penstock/pipeline/traced/pipe_state.h"
#include "penstock/stage_module.h"

namespace penstock {

// Fills modules, names and tensors of a pipe. Throws ValueError for a module registered under two parents.
void collect_model(const StageModule& module, PipeState& pipe);

// `aliases`: other names of parameters and buffers, by index.
using TensorAliases = std::map<std::size_t, std::vector<std::string>>;
TensorAliases aliases_of(const StageModule& module, const PipeState& pipe);

// Everything but the cut. Throws StateError, with the operator and its module, for a forward that computes
// with values of the running step: it is traced in two of them.
PipeVariant trace_variant(const StageModule& module, const PipeState& pipe, const TensorAliases& aliases,
                          const PipeExample& example, at::Device device);

// The modules of a model, parents first.
std::vector<std::shared_ptr<torch::nn::Module>> modules_of(const StageModule& module);

// The places of `other` that correspond to those of a trace of the same module with other sizes or in another
// mode: before the corresponding operator (align_traces.h), or the next one that has one. Throws ValueError
// if there is none.
std::vector<std::size_t> matching_places(const graph::ForwardTrace& trace,
                                         const std::vector<std::size_t>& places,
                                         const graph::ForwardTrace& other);

// Why stages that exchange the values of one cut, and own its parameters and buffers, cannot run the other;
// empty if they can.
std::string difference(const PipeVariant& expected, const PipeVariant& actual);

}  // namespace penstock
