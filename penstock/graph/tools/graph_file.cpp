#include "penstock/graph/tools/graph_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <utility>

#include "penstock/base/checksum.h"
#include "penstock/base/files.h"
#include "penstock/errors.h"
#include "penstock/graph/cache/byte_stream.h"
#include "penstock/graph/codec/graph_decoder.h"
#include "penstock/graph/codec/graph_encoder.h"

namespace penstock::graph {
namespace {

constexpr FileKind kGraphKind{"PSGRAPH1", "a graph file", kGraphFileVersion};
const std::string kSaveAgain = "write the file again with save_graph";

// Names and maps of names.
template <class Archive, class Kind>
void names(Archive& archive, std::vector<Kind>& all) {
  std::vector<std::string> texts;
  for (const Kind& name : all) texts.push_back(name.text);
  archive(texts);
  if constexpr (Archive::kReads)
    for (std::string& text : texts) all.emplace_back(std::move(text));
}
template <class Archive, class From, class To>
void names(Archive& archive, std::map<From, To>& all) {
  std::vector<std::pair<std::string, std::string>> texts;
  for (const auto& [from, to] : all) texts.emplace_back(from.text, to.text);
  archive(texts);
  if constexpr (Archive::kReads)
    for (const auto& [from, to] : texts) all.emplace(From(from), To(to));
}

template <class Archive>
void state_fields(Archive& archive, StateSignature& states) {
  auto& [input_tokens, input_random_states, output_tokens, output_random_states] = states;
  names(archive, input_tokens), names(archive, input_random_states);
  names(archive, output_tokens), names(archive, output_random_states);
}

template <class Archive>
void signature_fields(Archive& archive, GraphSignature& signature) {
  auto& [parameters, buffers, user_inputs, user_outputs, inputs_to_parameters, inputs_to_buffers,
         buffers_to_mutate, parameters_to_mutate, user_inputs_to_mutate, in_spec, out_spec, backward,
         states] = signature;
  names(archive, parameters), names(archive, buffers), names(archive, user_inputs),
      names(archive, user_outputs);
  names(archive, inputs_to_parameters), names(archive, inputs_to_buffers), names(archive, buffers_to_mutate);
  names(archive, parameters_to_mutate), names(archive, user_inputs_to_mutate);
  archive(in_spec, out_spec);
  state_fields(archive, states);
  bool any = backward.has_value();
  archive(any);
  if (!any) return;
  if constexpr (Archive::kReads) backward.emplace();
  auto& [to_parameters, to_user_inputs, loss_output, backward_states] = *backward;
  names(archive, to_parameters), names(archive, to_user_inputs);
  archive(loss_output.text);
  state_fields(archive, backward_states);
}

}  // namespace

std::uint64_t detail::graph_checksum(std::span<const std::uint8_t> bytes) { return checksum64(bytes); }

std::vector<std::uint8_t> encode_graph(const GraphFile& file) {
  const auto& [joint, meta, saved, signature] = file;
  GraphEncoder encoder("graph file");
  encoder(joint, meta, saved, signature.has_value());
  if (signature) {
    GraphSignature copy = *signature;
    signature_fields(encoder, copy);
  }
  return framed(kGraphKind, encoder.finish());
}

GraphFile decode_graph(std::span<const std::uint8_t> bytes, const std::string& path,
                       const std::vector<at::Tensor>& samples) {
  const std::string name = "graph file " + path;
  GraphDecoder decoder(unframed(kGraphKind, bytes, name, kSaveAgain), name, kSaveAgain, samples);
  GraphFile file;
  bool signed_ = false;
  decoder(file.joint, file.meta, file.saved, signed_);
  if (signed_) signature_fields(decoder, file.signature.emplace());
  decoder.expect_end();
  const JointGraph& joint = file.joint;
  const std::size_t inputs = joint.graph.inputs.size(), outputs = joint.graph.outputs.size();
  if (joint.states.size() > std::min(inputs, outputs) || joint.primals > inputs ||
      joint.primals + joint.tangents.size() != joint.first_state_input())
    decoder.fail("inconsistent number of inputs and tangents");
  if (joint.forward_outputs > joint.first_state_output() ||
      joint.written_in_backward.size() > joint.backward_returns())
    decoder.fail("inconsistent number of outputs");
  for (const std::size_t primal : joint.written_in_backward)
    if (primal >= joint.primals) decoder.fail("an input that does not exist is written in backward");
  if (joint.written_in_graph.size() > joint.forward_outputs)
    decoder.fail("more inputs are written in the graph than it has outputs");
  for (const std::size_t primal : joint.written_in_graph)
    if (primal >= joint.primals) decoder.fail("an input that does not exist is written in the graph");
  for (const ValueId value : file.saved)
    if (static_cast<std::int32_t>(value) < 0 || index_of(value) >= joint.graph.values.size())
      decoder.fail("a saved value that does not exist");
  if (file.meta.intermediate_bases > file.meta.outputs.size())
    decoder.fail("more intermediate bases than outputs");
  for (const std::size_t input : file.meta.static_inputs)
    if (input >= file.meta.inputs.size()) decoder.fail("a parameter that does not exist");
  return file;
}

void save_graph(const std::filesystem::path& path, const GraphFile& file) {
  const std::vector<std::uint8_t> bytes = encode_graph(file);
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  out.close();
  if (!out)
    throw ValueError(fmt::format("graph file {}: cannot be written; check the folder and the free disk space",
                                 path.string()));
}

GraphFile load_graph(const std::filesystem::path& path, const std::vector<at::Tensor>& samples) {
  const std::string bytes = read_file(path, "graph file", "pass the path of a file written by save_graph");
  return decode_graph({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()}, path.string(),
                      samples);
}

}  // namespace penstock::graph
