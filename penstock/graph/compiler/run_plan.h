// What an Executor does in a run, decided once: a list of steps, and the tensors of one run (a Frame) that
// they work on.
// Private to this folder. Thread safety: a plan is immutable; a frame belongs to one run.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "penstock/graph/compiler/plan_memory.h"
#include "penstock/graph/ir/symbolic_table.h"
#include "penstock/operator_traits.h"

namespace penstock::graph {

using Slot = std::uint32_t;  // where a tensor is during a run: its ValueId
inline constexpr Slot kNoSlot = static_cast<Slot>(-1);

// How a call gets one argument.
struct Argument {
  enum class Kind : std::uint8_t { Tensor, Constant, Symbolic, List, OptionalList };
  Kind kind = Kind::Constant;
  // Of a tensor that is not used afterwards and occurs once: a boxed call may take it from its slot.
  bool last_use = false;
  // Tensor: its slot. Lists: the index in ExecutionPlan::lists. Symbolic: the index in BoundSizes::constants.
  std::uint32_t slot = 0;
  // Constant: the value as the call wants it: an IValue, or what an unboxed call reads (unboxed_call.cpp). It
  // and everything else that a step refers to is in ExecutionPlan::memory.
  const void* constant = nullptr;
};

// Where a call puts one result.
struct Result {
  enum class Kind : std::uint8_t { Drop, Tensor, List };
  Kind kind = Kind::Drop;
  std::uint32_t slot = 0;  // of a list: the index in ExecutionPlan::lists; kNoSlot there: not kept
};

struct Frame;
struct Step;
using StepCall = void (*)(const Step& step, Frame& frame);
// Does what a step does, or returns false and does nothing.
using DirectKernel = bool (*)(const Step& step, Frame& frame);

// An operator with everything that its call needs.
struct Step {
  StepCall call = nullptr;
  c10::OperatorHandle op;
  const void* handle = nullptr;  // the typed handle of an unboxed call
  std::span<Argument> arguments;
  std::span<Result> results;
  // Freed after the call.
  std::span<const Slot> frees;
  bool grad_enabled = true;
  // Of a step that may be done in another way than by its operator: the operator's own call, and the index in
  // ExecutionPlan::views, ::reuses or ::generated, or the kernel.
  StepCall otherwise = nullptr;
  std::uint32_t special = 0;
  DirectKernel kernel = nullptr;
};

// A step that only makes views of one tensor: done without its operator where possible.
struct DirectView {
  Slot base = kNoSlot;
  std::span<const Slot> made;  // kNoSlot: not used
};

// A step whose result may be put into the memory of an argument that is not used afterwards.
struct MemoryReuse {
  Slot dead = kNoSlot, result = kNoSlot;
  Geometry geometry;  // of both; not compared if it depends on sizes
  Step writing;       // the operator that writes it
};

class GeneratedKernel;

// A step that calls generated code (generated_kernel.h).
struct GeneratedReuse {
  Slot dead = kNoSlot;
  std::size_t result = 0;              // its position
  const Geometry* geometry = nullptr;  // of both, in ExecutionPlan::memory
};
struct GeneratedCall {
  const GeneratedKernel* kernel = nullptr;
  std::span<const Slot> inputs, results;  // kNoSlot: a result that is not used
  std::vector<GeneratedReuse> reuses;
};

struct ExecutionPlan {
  PlanMemory memory;
  std::vector<Step> steps;
  std::vector<std::span<const Slot>> lists;
  std::vector<DirectView> views;
  std::vector<MemoryReuse> reuses;
  std::vector<GeneratedCall> generated;
  std::size_t slots = 0;  // one more than values; the last is always undefined
  Slot undefined_slot() const { return static_cast<Slot>(slots - 1); }
};

// What a view operator did in an earlier run with the same sizes.
struct ViewsMade {
  bool known = false;
  StridedLayout viewed;
  at::ScalarType dtype = at::kFloat;
  std::vector<StridedLayout> made;
};

// The tensors of one run. Kept between runs, so that a run allocates nothing but what its operators do.
struct Frame {
  explicit Frame(const ExecutionPlan& of)
      : plan(&of),
        slots(of.slots),
        views(of.views.size()),
        made_directly(of.views.empty() ? 0 : of.slots),
        idle_views(made_directly.size()) {}

  const ExecutionPlan* plan;
  const BoundSizes* sizes = nullptr;
  SymbolValues size_values;  // of the symbols in the latest run
  // No mode sees the operators of this run, so that some may be left out or replaced.
  bool unobserved = false;
  bool direct_kernels = false;  // may be used in this run
  std::vector<at::Tensor> slots;
  std::vector<ViewsMade> views;  // one for each step in ExecutionPlan::views
  // Views that no operator made: whether a slot holds one; tensor objects that are not in use, without
  // memory, one for each slot.
  std::vector<char> made_directly;
  std::vector<at::Tensor> idle_views;
  std::vector<at::Tensor> list;  // the elements of an argument
  Stack stack;
};

// ---- kinds of calls ----

// Through the stack: any operator.
void call_boxed(const Step& step, Frame& frame);
// Makes views, or calls the operator.
void call_view(const Step& step, Frame& frame);
// Overwrites a tensor that is not used afterwards, or calls the operator.
void call_reusing(const Step& step, Frame& frame);
// Computes without the operator (direct_kernel.h), or calls it.
void call_direct(const Step& step, Frame& frame);

// Calls generated code.
void call_generated(const Step& step, Frame& frame);

// To be called if constants differ from those of the previous run.
void forget_views(Frame& frame);

// Ends the use of a slot: frees its tensor, or keeps the object if it was a view that nobody else holds.
void free_slot(Frame& frame, Slot slot);

}  // namespace penstock::graph
