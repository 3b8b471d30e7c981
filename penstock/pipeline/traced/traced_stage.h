// The forward of a stage of a traced pipeline: chooses the trace for the tensors it gets, and replays its
// nodes.
//
//   const TracedStage stage(pipe, 1, tree, tensors, device);
//   Tree outputs = stage.forward(Tree::tuple({activation}), kwargs);
//
// A stage returns what the next stage takes, then what skips stages. Where nothing goes to the next stage, an
// empty tensor does, because neighbours always exchange something. Thread safety: that of modules.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "penstock/graph/stages/node_replay.h"
#include "penstock/pipeline/traced/module_tree.h"
#include "penstock/pipeline/traced/pipe_state.h"

namespace penstock {

class TracedStage {
 public:
  // `tensors`: by index in the model; undefined where the stage has none.
  TracedStage(Pipe pipe, int stage, ModuleTree tree, std::vector<at::Tensor> tensors, at::Device device);

  // Throws ValueError for tensors without an example, for plain values that differ from the example, for
  // keyword arguments that are missing, under another autocast or default dtype than the trace, and if a
  // gradient that was not required in the trace would be lost.
  Tree forward(const Tree& args, const Tree& kwargs) const;

  // The records of inputs and outputs for the main example, as tensors without memory.
  std::vector<at::Tensor> example_inputs() const;
  std::vector<at::Tensor> example_outputs() const;

 private:
  struct Variant {
    const PipeVariant* traced;
    const graph::CutStage* cut;
    std::vector<std::size_t> state;  // by index in the model: the first inputs of the replay
    // Then the keyword arguments, then these.
    std::vector<graph::ValueId> received;
    graph::NodeReplay replay;
    std::size_t program;  // the first variant for which this stage computes the same
  };
  // The tensors that a call passes: keyword arguments and what was received.
  struct Given {
    std::vector<at::Tensor> tensors;
    std::string why_not;  // they do not belong to the variant
    std::string missing;  // a keyword argument that it takes, and the call does not have
  };
  bool is_first() const { return stage_ == 0; }
  bool is_last() const { return stage_ + 1 == state_of(pipe_).stages(); }
  Variant make_variant(const PipeVariant& traced, at::Device device) const;
  bool in_mode_of(const PipeVariant& traced) const;
  Given given_to(const Variant& variant, const Tree& args, const Tree& kwargs) const;
  void take_arguments(const Variant& variant, const Tree& args, Given& given) const;
  void take_keywords(const Variant& variant, const Tree& kwargs, Given& given) const;
  void take_received(const Variant& variant, const Tree& args, Given& given) const;
  // What one of the tensors of `Given` is in the trace.
  static graph::ValueId value_of(const Variant& variant, std::size_t given);
  const Variant& choose(const Tree& args, const Tree& kwargs, Given& given) const;
  // `inputs`: of the replay.
  void refuse_lost_gradients(const Variant& variant, const std::vector<at::Tensor>& inputs) const;
  void check_surroundings() const;
  [[noreturn]] void refuse_as_ambiguous(const Variant& one, const Variant& other) const;
  std::string name_of(const Variant& variant, std::size_t received) const;
  at::Tensor example(const PipeVariant& traced, graph::ValueId value) const;

  Pipe pipe_;
  int stage_;
  ModuleTree tree_;
  std::vector<at::Tensor> tensors_;
  at::Device device_;
  std::vector<Variant> variants_;
};

}  // namespace penstock
