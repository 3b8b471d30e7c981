#include "penstock/graph/tools/graph_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>

#include "penstock/base/checksum.h"
#include "penstock/base/files.h"
#include "penstock/errors.h"
#include "penstock/graph/tools/byte_stream.h"
#include "penstock/torch/compat/dtype.h"

namespace penstock::graph {

std::uint64_t detail::graph_checksum(std::span<const std::uint8_t> bytes) {
  require_xxhash("graph files");
  return checksum64(bytes);
}

void ByteReader::fail(const std::string& why) const {
  throw ValueError(
      fmt::format("graph file {}: byte {}: {}; write the file again with save_graph", name_, at_, why));
}

namespace {

constexpr std::string_view kMagic = "PSGRAPH1";
constexpr std::size_t kHeaderBytes = 8 + 4 + 8 + 8;
constexpr std::size_t kMostDims = 64;
constexpr std::int64_t kMostElements = std::int64_t{1} << 50;
constexpr int kDeepest = 8;  // nesting of lists

enum class ConstantKind : std::uint8_t {
  None,
  Int,
  Double,
  Bool,
  Complex,
  String,
  Device,
  IntList,
  DoubleList,
  BoolList,
  List,
  Undefined,
  Number
};

// ---- writing ----

class GraphWriter {
 public:
  std::vector<std::uint8_t> write(const GraphFile& file) {
    // The kinds and contexts of subclasses, in particular a DTensor's mesh, belong to a process.
    if (file.joint.subclasses)
      throw ValueError(
          "graph: some inputs or results are tensor subclasses, whose context cannot be saved; save a "
          "capture over plain tensors");
    if (!file.joint.written_in_graph.empty())
      throw ValueError(fmt::format(
          "graph: {} is written by the graph itself, which a file cannot say; save a capture without "
          "keep_input_mutations",
          file.joint.graph.inputs.at(file.joint.written_in_graph[0]).name));
    graph(file.joint.graph);
    out_.count(file.joint.primals);
    out_.count(file.joint.forward_outputs);
    list(file.joint.written_in_backward, [&](std::size_t primal) { out_.count(primal); });
    list(file.joint.tangents, [&](const TangentInfo& tangent) { this->tangent(tangent); });
    meta(file.meta);
    list(file.saved, [&](ValueId value) { id(value); });
    out_.flag(file.signature.has_value());
    if (file.signature) signature(*file.signature);
    return std::move(out_.bytes);
  }

 private:
  template <class Items, class Each>
  void list(const Items& items, const Each& each) {
    out_.count(items.size());
    for (const auto& item : items) each(item);
  }
  void id(ValueId value) { out_.number(static_cast<std::int32_t>(value)); }
  void place(const std::optional<std::size_t>& value) {
    out_.flag(value.has_value());
    if (value) out_.count(*value);
  }

  void dtype(at::ScalarType type) {
    const std::optional<std::uint8_t> number = dtype_number(type);
    if (!number)
      throw NotImplemented(fmt::format(
          "graph file: dtype {} cannot be saved; remove it from the captured function", c10::toString(type)));
    out_.number(*number);
  }

  void geometry(const Geometry& geometry) {
    list(geometry.sizes, [&](std::int64_t size) { out_.number(size); });
    for (const std::int64_t stride : geometry.strides) out_.number(stride);
    out_.number(geometry.storage_offset);
    dtype(geometry.dtype);
    out_.text(geometry.device.str());
    out_.flag(geometry.conjugated);
    out_.flag(geometry.negated);
  }

  void tensor(const at::Tensor& tensor) {
    const at::Tensor plain = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg();
    dtype(plain.scalar_type());
    list(plain.sizes(), [&](std::int64_t size) { out_.number(size); });
    out_.raw({static_cast<const std::uint8_t*>(plain.data_ptr()), plain.nbytes()});
  }

  void constant(const c10::IValue& value) {
    const auto kind = [&](ConstantKind kind) { out_.number(static_cast<std::uint8_t>(kind)); };
    if (value.isNone()) return kind(ConstantKind::None);
    if (value.isInt()) return kind(ConstantKind::Int), out_.number(value.toInt());
    if (value.isDouble()) return kind(ConstantKind::Double), out_.number(value.toDouble());
    if (value.isBool()) return kind(ConstantKind::Bool), out_.flag(value.toBool());
    if (value.isComplexDouble())
      return kind(ConstantKind::Complex), out_.number(value.toComplexDouble().real()),
             out_.number(value.toComplexDouble().imag());
    if (value.isString()) return kind(ConstantKind::String), out_.text(value.toStringRef());
    if (value.isDevice()) return kind(ConstantKind::Device), out_.text(value.toDevice().str());
    if (value.isIntList())
      return kind(ConstantKind::IntList),
             list(value.toIntVector(), [&](std::int64_t item) { out_.number(item); });
    if (value.isDoubleList())
      return kind(ConstantKind::DoubleList),
             list(value.toDoubleVector(), [&](double item) { out_.number(item); });
    if (value.isBoolList())
      return kind(ConstantKind::BoolList), list(value.toBoolList(), [&](bool item) { out_.flag(item); });
    if (value.isTensor() && !value.toTensor().defined()) return kind(ConstantKind::Undefined);
    if (value.isTensor() && value.toTensor().dim() == 0)
      return kind(ConstantKind::Number), tensor(value.toTensor());
    if (value.isList() && !value.isTensorList())
      return kind(ConstantKind::List),
             list(value.toListRef(), [&](const c10::IValue& item) { constant(item); });
    throw NotImplemented(
        fmt::format("graph file: a constant of kind {} cannot be saved; remove it from the captured function",
                    value.tagKind()));
  }

  void operand(const Operand& operand) {
    out_.number(static_cast<std::uint8_t>(operand.kind));
    if (operand.kind == Operand::Kind::Constant) return constant(operand.constant);
    list(operand.values, [&](ValueId value) { id(value); });
  }

  void graph(const Graph& graph) {
    out_.number(graph.storages);
    list(graph.values, [&](const Value& value) {
      geometry(value.geometry);
      out_.number(static_cast<std::int32_t>(value.storage));
    });
    list(graph.inputs, [&](const Placeholder& input) { id(input.value), out_.text(input.name); });
    list(graph.constants,
         [&](const ConstantTensor& constant) { id(constant.value), tensor(constant.tensor); });
    list(graph.nodes, [&](const Node& node) {
      out_.text(node.op.operator_name().name);
      out_.text(node.op.operator_name().overload_name);
      list(node.arguments, [&](const Operand& each) { operand(each); });
      list(node.results, [&](const Operand& each) { operand(each); });
      out_.number(static_cast<std::uint8_t>(node.phase));
      out_.flag(node.grad_enabled);
    });
    list(graph.outputs, [&](const Operand& each) { operand(each); });
  }

  void view_step(const ViewStep& step) {
    out_.text(step.op.operator_name().name);
    out_.text(step.op.operator_name().overload_name);
    list(step.arguments, [&](const Operand& each) { operand(each); });
    out_.count(step.viewed);
    out_.count(step.result);
    place(step.element);
  }

  void tangent(const TangentInfo& tangent) {
    out_.number(static_cast<std::uint8_t>(tangent.kind));
    out_.count(tangent.index);
    geometry(tangent.geometry);
  }

  void meta(const ViewAndMutationMeta& meta) {
    list(meta.inputs, [&](const InputInfo& info) {
      for (const bool flag :
           {info.is_leaf, info.mutates_data, info.mutates_metadata, info.mutations_hidden_from_autograd,
            info.mutations_under_no_grad, info.mutates_storage_metadata, info.resizes_storage,
            info.requires_grad, info.keep_input_mutations, info.is_touched, info.is_tensor})
        out_.flag(flag);
    });
    list(meta.outputs, [&](const OutputInfo& info) {
      out_.number(static_cast<std::uint8_t>(info.kind));
      out_.number(static_cast<std::uint8_t>(info.type));
      place(info.base_index);
      out_.flag(info.requires_grad);
      out_.flag(info.requires_grad_for_backward);
      out_.flag(info.has_view_replay);
      out_.flag(info.by_geometry);
      place(info.same_as);
      geometry(info.geometry);
      list(info.view.steps, [&](const ViewStep& step) { view_step(step); });
    });
    out_.count(meta.intermediate_bases);
    out_.flag(meta.keep_input_mutations);
    list(meta.static_inputs, [&](std::size_t input) { out_.count(input); });
    list(meta.tangents, [&](const TangentInfo& each) { tangent(each); });
    out_.number(static_cast<std::uint8_t>(meta.grad_mode_after ? (*meta.grad_mode_after ? 2 : 1) : 0));
  }

  template <class Names>
  void names(const Names& names) {
    list(names, [&](const auto& name) { out_.text(name.text); });
  }
  template <class Map>
  void map(const Map& map) {
    list(map, [&](const auto& item) { out_.text(item.first.text), out_.text(item.second.text); });
  }

  void signature(const GraphSignature& signature) {
    names(signature.parameters), names(signature.buffers), names(signature.user_inputs),
        names(signature.user_outputs);
    map(signature.inputs_to_parameters), map(signature.inputs_to_buffers), map(signature.buffers_to_mutate),
        map(signature.parameters_to_mutate);
    map(signature.user_inputs_to_mutate);
    out_.text(signature.in_spec), out_.text(signature.out_spec);
    names(signature.input_tokens), names(signature.output_tokens);
    out_.flag(signature.backward.has_value());
    if (!signature.backward) return;
    map(signature.backward->gradients_to_parameters), map(signature.backward->gradients_to_user_inputs);
    out_.text(signature.backward->loss_output.text);
  }

  ByteWriter out_;
};

// ---- reading ----

class GraphReader {
 public:
  GraphReader(std::span<const std::uint8_t> bytes, const std::string& name) : in_(bytes, name) {}

  GraphFile read() {
    GraphFile file;
    graph(&file.joint.graph);
    file.joint.primals = bounded(file.joint.graph.inputs.size());
    file.joint.forward_outputs = bounded(file.joint.graph.outputs.size());
    list(8, [&] {
      file.joint.written_in_backward.push_back(bounded(file.joint.primals));
      if (file.joint.written_in_backward.back() == file.joint.primals)
        in_.fail("an input that does not exist is written in backward");
    });
    if (file.joint.forward_outputs + file.joint.written_in_backward.size() > file.joint.graph.outputs.size())
      in_.fail("inconsistent number of outputs");
    list(10, [&] { file.joint.tangents.push_back(tangent()); });
    if (file.joint.primals + file.joint.tangents.size() != file.joint.graph.inputs.size())
      in_.fail("inconsistent number of inputs and tangents");
    meta(&file.meta);
    list(4, [&] { file.saved.push_back(id(file.joint.graph)); });
    if (in_.flag()) file.signature = signature();
    if (in_.remaining() != 0) in_.fail(fmt::format("{} trailing bytes", in_.remaining()));
    try {
      verify(file.joint.graph);
    } catch (const std::exception& error) {
      in_.fail(error.what());
    }
    return file;
  }

 private:
  template <class Each>
  void list(std::size_t least, const Each& each) {
    for (std::size_t left = in_.count(least); left > 0; --left) each();
  }
  std::size_t bounded(std::size_t most) {
    const auto value = in_.number<std::uint64_t>();
    if (value > most) in_.fail("a count that is too large");
    return static_cast<std::size_t>(value);
  }
  ValueId id(const Graph& graph, bool may_miss = false) {
    const auto value = in_.number<std::int32_t>();
    if (value < (may_miss ? -1 : 0) || (value >= 0 && static_cast<std::size_t>(value) >= graph.values.size()))
      in_.fail(fmt::format("value {} does not exist", value));
    return ValueId{value};
  }
  std::optional<std::size_t> place() {
    if (!in_.flag()) return std::nullopt;
    return static_cast<std::size_t>(in_.number<std::uint64_t>());
  }

  at::ScalarType dtype() {
    const auto number = in_.number<std::uint8_t>();
    const DtypeEntry* entry = find_dtype(number);
    if (!entry || !entry->here)
      in_.fail(fmt::format("dtype number {} is not known to this LibTorch", number));
    return *entry->here;
  }

  at::Device device() {
    const std::string text = in_.text();
    try {
      return at::Device(text);
    } catch (const c10::Error&) {
      in_.fail("unknown device '" + text + "'");
    }
  }

  std::size_t dims() {
    const std::size_t count = in_.count(8);
    if (count > kMostDims) in_.fail(fmt::format("a tensor with {} dims, which is too many", count));
    return count;
  }
  std::int64_t natural() {
    const auto value = in_.number<std::int64_t>();
    if (value < 0 || value > (std::int64_t{1} << 48)) in_.fail(fmt::format("invalid size {}", value));
    return value;
  }

  Geometry geometry() {
    Geometry geometry;
    const std::size_t count = dims();
    for (std::size_t i = 0; i < count; ++i) geometry.sizes.push_back(natural());
    for (std::size_t i = 0; i < count; ++i) geometry.strides.push_back(natural());
    geometry.storage_offset = natural();
    // Products of these must not overflow.
    std::int64_t elements = 1, reach = geometry.storage_offset;
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t size = geometry.sizes[i], stride = geometry.strides[i];
      if (size > 0 &&
          (elements > kMostElements / size || (size > 1 && stride > (kMostElements - reach) / (size - 1))))
        in_.fail("a tensor that is too large");
      elements *= std::max<std::int64_t>(size, 1);
      reach += size > 1 ? (size - 1) * stride : 0;
    }
    geometry.dtype = dtype();
    geometry.device = device();
    geometry.conjugated = in_.flag();
    geometry.negated = in_.flag();
    if (geometry.conjugated && !c10::isComplexType(geometry.dtype))
      in_.fail("a conjugate of a tensor that is not complex");
    return geometry;
  }

  at::Tensor tensor() {
    const at::ScalarType type = dtype();
    std::vector<std::int64_t> sizes(dims());
    std::size_t bytes = c10::elementSize(type);
    bool empty = false;
    for (std::int64_t& size : sizes) {
      size = natural();
      empty |= size == 0;
      // Too many, whatever follows.
      if (size > 0 && bytes > in_.remaining() / static_cast<std::size_t>(size))
        bytes = in_.remaining() + 1;
      else
        bytes *= static_cast<std::size_t>(std::max<std::int64_t>(size, 1));
    }
    if (empty) bytes = 0;
    const std::span<const std::uint8_t> from = in_.take(bytes);
    at::Tensor made = at::empty(sizes, type);
    if (bytes > 0) std::memcpy(made.data_ptr(), from.data(), bytes);
    return made;
  }

  c10::IValue constant(int depth = 0) {
    switch (in_.choice(ConstantKind::Number)) {
      case ConstantKind::None:
        return {};
      case ConstantKind::Int:
        return in_.number<std::int64_t>();
      case ConstantKind::Double:
        return in_.number<double>();
      case ConstantKind::Bool:
        return in_.flag();
      case ConstantKind::Complex: {
        const auto real = in_.number<double>(), imaginary = in_.number<double>();
        return c10::complex<double>(real, imaginary);
      }
      case ConstantKind::String:
        return in_.text();
      case ConstantKind::Device:
        return device();
      case ConstantKind::IntList: {
        std::vector<std::int64_t> items;
        list(8, [&] { items.push_back(in_.number<std::int64_t>()); });
        return items;
      }
      case ConstantKind::DoubleList: {
        std::vector<double> items;
        list(8, [&] { items.push_back(in_.number<double>()); });
        return items;
      }
      case ConstantKind::BoolList: {
        c10::List<bool> items;
        list(1, [&] { items.push_back(in_.flag()); });
        return items;
      }
      case ConstantKind::List: {
        if (depth >= kDeepest) in_.fail("lists nested too deeply");
        c10::impl::GenericList items(c10::AnyType::get());
        list(1, [&] { items.push_back(constant(depth + 1)); });
        return items;
      }
      case ConstantKind::Undefined:
        return at::Tensor();
      case ConstantKind::Number: {
        at::Tensor number = tensor();
        if (number.dim() != 0) in_.fail("a number that is not a 0-dim tensor");
        number.unsafeGetTensorImpl()->set_wrapped_number(true);
        return number;
      }
    }
    in_.fail("a constant of unknown kind");
  }

  Operand operand(const Graph& graph) {
    Operand operand;
    operand.kind = in_.choice(Operand::Kind::OptionalTensorList);
    if (operand.kind == Operand::Kind::Constant) {
      operand.constant = constant();
      return operand;
    }
    list(4, [&] { operand.values.push_back(id(graph, /*may_miss=*/true)); });
    if (operand.kind == Operand::Kind::Tensor && operand.values.size() != 1)
      in_.fail("a tensor operand without exactly one value");
    return operand;
  }

  void graph(Graph* graph) {
    graph->storages = in_.number<std::int32_t>();
    list(40, [&] {
      Value value{geometry(), {}};
      value.storage = StorageId{in_.number<std::int32_t>()};
      if (static_cast<std::int32_t>(value.storage) < 0 ||
          static_cast<std::int32_t>(value.storage) >= graph->storages)
        in_.fail("invalid storage");
      graph->values.push_back(std::move(value));
    });
    // Memory is allocated per storage later, so their number is limited by the number of values.
    if (graph->storages < 0 || static_cast<std::size_t>(graph->storages) > 4 * graph->values.size() + 16)
      in_.fail("more storages than values");
    list(12, [&] {
      const ValueId value = id(*graph);
      graph->inputs.push_back({value, in_.text()});
    });
    list(16, [&] {
      const ValueId value = id(*graph);
      at::Tensor held = tensor();
      const Geometry& geometry = (*graph)[value].geometry;
      if (held.sizes() != at::IntArrayRef(geometry.sizes) || held.scalar_type() != geometry.dtype)
        in_.fail("a constant whose shape differs from its value's");
      if (held.strides() != at::IntArrayRef(geometry.strides)) held = as_laid_out(held, geometry);
      // The memory of a lazy conjugate holds the unconjugated values.
      if (geometry.conjugated) held = held.conj().resolve_conj().conj();
      if (geometry.negated) held = held._neg_view().resolve_neg()._neg_view();
      graph->constants.push_back(
          {value, geometry.device.is_cpu() ? std::move(held) : held.to(geometry.device)});
    });
    list(34, [&] { node(graph); });
    list(1, [&] { graph->outputs.push_back(operand(*graph)); });
  }

  at::Tensor as_laid_out(const at::Tensor& held, const Geometry& geometry) {
    // Large strides would need more memory than the size of the file justifies.
    std::int64_t reach = 1;
    for (std::size_t i = 0; i < geometry.sizes.size(); ++i) {
      if (geometry.sizes[i] > 1 && geometry.strides[i] > (std::int64_t{1} << 40) / geometry.sizes[i])
        in_.fail("a constant with strides that are too large");
      reach += geometry.sizes[i] > 1 ? (geometry.sizes[i] - 1) * geometry.strides[i] : 0;
    }
    if (reach > 4 * held.numel() + 1024) in_.fail("a constant with strides that are too large");
    return at::empty_strided(geometry.sizes, geometry.strides, held.options()).copy_(held);
  }

  void node(Graph* graph) {
    Node node{op(), {}, {}, Phase::Forward, true};
    list(2, [&] { node.arguments.push_back(operand(*graph)); });
    list(2, [&] { node.results.push_back(operand(*graph)); });
    node.phase = in_.choice(Phase::Backward);
    node.grad_enabled = in_.flag();
    graph->nodes.push_back(std::move(node));
  }

  c10::OperatorHandle op() {
    const std::string name = in_.text(), overload = in_.text();
    const auto found = c10::Dispatcher::singleton().findSchema({name, overload});
    if (!found)
      in_.fail(
          fmt::format("this LibTorch has no operator {}{}{}", name, overload.empty() ? "" : ".", overload));
    return *found;
  }

  ViewStep view_step() {
    static const Graph no_values;
    ViewStep step{op(), {}, 0, 0, std::nullopt};
    list(2, [&] { step.arguments.push_back(operand(no_values)); });
    step.viewed = static_cast<std::size_t>(in_.number<std::uint64_t>());
    step.result = static_cast<std::size_t>(in_.number<std::uint64_t>());
    step.element = place();
    if (step.arguments.size() != step.op.schema().arguments().size() ||
        step.viewed >= step.arguments.size() || step.result >= step.op.schema().returns().size())
      in_.fail("a view step that does not match its operator");
    return step;
  }

  TangentInfo tangent() {
    TangentInfo tangent;
    tangent.kind = in_.choice(TangentInfo::Kind::IntermediateBase);
    tangent.index = static_cast<std::size_t>(in_.number<std::uint64_t>());
    tangent.geometry = geometry();
    return tangent;
  }

  void meta(ViewAndMutationMeta* meta) {
    list(11, [&] {
      InputInfo info;
      for (bool* flag :
           {&info.is_leaf, &info.mutates_data, &info.mutates_metadata, &info.mutations_hidden_from_autograd,
            &info.mutations_under_no_grad, &info.mutates_storage_metadata, &info.resizes_storage,
            &info.requires_grad, &info.keep_input_mutations, &info.is_touched, &info.is_tensor})
        *flag = in_.flag();
      try {
        info.validate(meta->inputs.size());
      } catch (const ValueError& error) {
        in_.fail(error.what());
      }
      meta->inputs.push_back(info);
    });
    list(32, [&] {
      OutputInfo info;
      info.kind = in_.choice(OutputKind::CustomFunctionView);
      info.type = in_.choice(OutputType::Other);
      info.base_index = place();
      info.requires_grad = in_.flag();
      info.requires_grad_for_backward = in_.flag();
      info.has_view_replay = in_.flag();
      info.by_geometry = in_.flag();
      info.same_as = place();
      info.geometry = geometry();
      list(34, [&] { info.view.steps.push_back(view_step()); });
      meta->outputs.push_back(std::move(info));
    });
    meta->intermediate_bases = bounded(meta->outputs.size());
    meta->keep_input_mutations = in_.flag();
    list(8, [&] { meta->static_inputs.push_back(bounded(meta->inputs.size())); });
    list(10, [&] { meta->tangents.push_back(tangent()); });
    const auto grad_mode = in_.number<std::uint8_t>();
    if (grad_mode > 2) in_.fail("invalid grad mode");
    if (grad_mode > 0) meta->grad_mode_after = grad_mode == 2;
  }

  template <class Name>
  void names(std::vector<Name>* names) {
    list(8, [&] { names->emplace_back(in_.text()); });
  }
  template <class From, class To>
  void map(std::map<From, To>* map) {
    list(16, [&] {
      From from(in_.text());
      map->emplace(std::move(from), To(in_.text()));
    });
  }

  GraphSignature signature() {
    GraphSignature signature;
    names(&signature.parameters), names(&signature.buffers), names(&signature.user_inputs),
        names(&signature.user_outputs);
    map(&signature.inputs_to_parameters), map(&signature.inputs_to_buffers),
        map(&signature.buffers_to_mutate), map(&signature.parameters_to_mutate);
    map(&signature.user_inputs_to_mutate);
    signature.in_spec = in_.text();
    signature.out_spec = in_.text();
    names(&signature.input_tokens), names(&signature.output_tokens);
    if (!in_.flag()) return signature;
    BackwardSignature backward;
    map(&backward.gradients_to_parameters), map(&backward.gradients_to_user_inputs);
    backward.loss_output = GraphOutput(in_.text());
    signature.backward = std::move(backward);
    return signature;
  }

  ByteReader in_;
};

}  // namespace

std::vector<std::uint8_t> encode_graph(const GraphFile& file) {
  if (file.joint.graph.table)
    throw NotImplemented(
        "graph: files cannot contain symbols, but the graph has some; save the result of bind() for the "
        "sizes you want");
  const std::vector<std::uint8_t> fields = GraphWriter().write(file);
  ByteWriter out;
  out.raw({reinterpret_cast<const std::uint8_t*>(kMagic.data()), kMagic.size()});
  out.number(kGraphFileVersion);
  out.count(fields.size());
  out.number(detail::graph_checksum(fields));
  out.raw(fields);
  return std::move(out.bytes);
}

GraphFile decode_graph(std::span<const std::uint8_t> bytes, const std::string& name) {
  ByteReader header(bytes, name);
  if (bytes.size() < kHeaderBytes || std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0)
    header.fail("this is not a graph file");
  header.take(kMagic.size());
  if (const auto version = header.number<std::uint32_t>(); version != kGraphFileVersion)
    header.fail(
        fmt::format("version {}, expected {}{}", version, kGraphFileVersion,
                    version > kGraphFileVersion
                        ? "; it was written by a newer version of Penstock, which is needed to read it"
                        : "; write it again with this version of Penstock"));
  const auto size = header.number<std::uint64_t>();
  const auto checksum = header.number<std::uint64_t>();
  if (size != header.remaining())
    header.fail(fmt::format("{} bytes follow the header, expected {}", header.remaining(), size));
  const std::span<const std::uint8_t> fields = bytes.subspan(kHeaderBytes);
  if (detail::graph_checksum(fields) != checksum) header.fail("checksum mismatch: the file is damaged");
  return GraphReader(fields, name).read();
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

GraphFile load_graph(const std::filesystem::path& path) {
  const std::string bytes = read_file(path, "graph file", "pass the path of a file written by save_graph");
  return decode_graph({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()}, path.string());
}

}  // namespace penstock::graph
