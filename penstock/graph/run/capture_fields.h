// The fields of captures, each listed once for writing and reading; see penstock/graph/codec/fields.h.
// Private to this folder.
#pragma once

#include "penstock/graph/codec/fields.h"
#include "penstock/graph/run/compiled_call.h"
#include "penstock/graph/run/function_capture.h"

namespace penstock::graph {

constexpr SecondDerivatives last_of(SecondDerivatives) { return SecondDerivatives::Refuse; }

// Without the decompositions, which are code: the joint graph is what they have made.
template <class Archive, Is<Convention> T>
void fields(Archive& archive, T& convention) {
  auto& [found, names, decompositions] = convention;
  archive(found, names);
}

template <class Archive, Is<AutocastState> T>
void fields(Archive& archive, T& state) {
  auto& [cpu, cuda, cached, cpu_dtype, cuda_dtype] = state;
  archive(cpu, cuda, cached, cpu_dtype, cuda_dtype);
}

template <class Archive, Is<DynamicSymbol::Place> T>
void fields(Archive& archive, T& place) {
  auto& [input, dim] = place;
  archive(input, dim);
}

template <class Archive, Is<DynamicSymbol> T>
void fields(Archive& archive, T& symbol) {
  auto& [name, places, min, max, multiple_of] = symbol;
  archive(name, places, min, max, multiple_of);
}

template <class Archive, Is<Partition> T>
void fields(Archive& archive, T& halves) {
  auto& [forward, backward, saved, deferred] = halves;
  archive(forward, backward, saved, deferred);
}

// Gives the list of fields access to those of a guard.
struct CallGuardFields {
  using Input = CallGuard::Input;
  using Modes = CallGuard::Modes;

  template <class Archive, class T>
  static void list(Archive& archive, T& guard) {
    auto& [inputs, names, any_sharing, modes] = guard;
    archive(inputs, names, any_sharing, modes);
  }
};

template <class Archive, Is<CallGuardFields::Modes> T>
void fields(Archive& archive, T& modes) {
  auto& [grad, inference, deterministic, autocast, default_dtype] = modes;
  archive(grad, inference, deterministic, autocast, default_dtype);
}

template <class Archive, Is<CallGuardFields::Input> T>
void fields(Archive& archive, T& input) {
  auto& [tensor, subclass, value, requires_grad, is_leaf, is_view, same_as, shares_with] = input;
  archive(tensor, value, requires_grad, is_leaf, is_view, same_as, shares_with);
  archive_shared(archive, subclass);
}

template <class Archive, Is<CallGuard> T>
void fields(Archive& archive, T& guard) {
  CallGuardFields::list(archive, guard);
}

template <class Archive, Is<CompiledCode> T>
void fields(Archive& archive, T& code) {
  auto& [forward, backward, weights] = code;
  archive(forward, backward, weights);
}

// Gives the list of fields access to those of what runs a function again.
struct RunAgainFields {
  using Primal = RunAgain::Primal;
  using Root = RunAgain::Root;

  template <class Archive, class T>
  static void list(Archive& archive, T& again) {
    auto& [function, found, inputs, primals, roots, autocast, why_not] = again;
    archive(found, inputs, primals, roots, autocast, why_not);
  }
};

template <class Archive, Is<RunAgainFields::Primal> T>
void fields(Archive& archive, T& primal) {
  auto& [input, name] = primal;
  archive(input, name);
}

template <class Archive, Is<RunAgainFields::Root> T>
void fields(Archive& archive, T& root) {
  auto& [output, base] = root;
  archive(output, base);
}

// Without the function, which is code.
template <class Archive, Is<RunAgain> T>
void fields(Archive& archive, T& again) {
  RunAgainFields::list(archive, again);
}

// Without the wrappers, which the program must know.
template <class Archive, Is<FunctionCapture> T>
void fields(Archive& archive, T& capture) {
  auto& [guard, wrappers, meta, convention, joint, written, shares_changed, geometry_after, memory_after,
         run_again, second_derivatives, memory_of_output, symbols] = capture;
  archive(guard, meta, convention, joint, written, shares_changed, geometry_after, memory_after,
          second_derivatives, memory_of_output, symbols);
  archive_shared(archive, run_again);
}

}  // namespace penstock::graph
