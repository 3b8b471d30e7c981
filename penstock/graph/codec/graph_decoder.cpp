#include "penstock/graph/codec/graph_decoder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/graph/ir/state_operator.h"
#include "penstock/torch/compat/dtype.h"

namespace penstock::graph {
namespace {

constexpr std::size_t kMostDims = 64;
constexpr std::int64_t kMostElements = std::int64_t{1} << 50;
constexpr int kDeepest = 8;  // nesting of lists, and of subclasses

}  // namespace

GraphDecoder::GraphDecoder(std::span<const std::uint8_t> bytes, std::string name, std::string remedy,
                           std::vector<at::Tensor> samples)
    : in_(bytes, std::move(name), std::move(remedy)), samples_(std::move(samples)) {
  read_tables();
}

void GraphDecoder::expect_end() {
  if (in_.remaining() != 0) fail(fmt::format("{} trailing bytes", in_.remaining()));
}

void GraphDecoder::read_tables() {
  for (std::size_t left = in_.count(16); left > 0; --left) {
    const std::string name = in_.text(), overload = in_.text();
    const auto found = find_operator(name, overload);
    if (!found)
      fail(fmt::format("this LibTorch has no operator {}{}{}", name, overload.empty() ? "" : ".", overload));
    operators_.push_back(*found);
  }
  const std::size_t geometries = in_.count(32);
  geometries_.reserve(geometries);
  for (std::size_t i = 0; i < geometries; ++i) geometries_.push_back(read_geometry());
  for (std::size_t left = in_.count(16); left > 0; --left) memories_.push_back(read_memory());
  for (std::size_t left = in_.count(1); left > 0; --left) tensors_.push_back(read_tensor());
  const std::size_t constants = in_.count(5);
  constants_.reserve(constants);
  for (std::size_t i = 0; i < constants; ++i) read_constant(constants_.emplace_back());
  for (std::size_t left = in_.count(1); left > 0; --left) {
    SymbolicTable table;
    item(table);
    tables_.push_back(std::make_shared<const SymbolicTable>(std::move(table)));
  }
}

std::size_t GraphDecoder::dims() {
  const std::size_t count = in_.count(16);
  if (count > kMostDims) fail(fmt::format("a tensor with {} dims, which is too many", count));
  return count;
}

std::int64_t GraphDecoder::natural() {
  const auto value = in_.number<std::int64_t>();
  if (value < 0 || value > (std::int64_t{1} << 48)) fail(fmt::format("invalid size {}", value));
  return value;
}

void GraphDecoder::item(at::ScalarType& type) {
  const auto number = in_.number<std::uint8_t>();
  const DtypeEntry* found = find_dtype(number);
  if (!found || !found->here) fail(fmt::format("dtype number {} is not known to this LibTorch", number));
  type = *found->here;
}

void GraphDecoder::item(at::Device& device) {
  const std::string text = in_.text();
  if (text == "cpu") {
    device = at::kCPU;
    return;
  }
  try {
    device = at::Device(text);
  } catch (const c10::Error&) {
    fail("unknown device '" + text + "'");
  }
}

void GraphDecoder::item(StridedLayout& layout) {
  const std::size_t count = dims();
  layout.sizes.resize(count);
  layout.strides.resize(count);
  for (std::int64_t& size : layout.sizes) size = natural();
  for (std::int64_t& stride : layout.strides) stride = natural();
  layout.storage_offset = natural();
  // Products of these must not overflow.
  std::int64_t elements = 1, reach = layout.storage_offset;
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t size = layout.sizes[i], stride = layout.strides[i];
    if (size > 0 &&
        (elements > kMostElements / size || (size > 1 && stride > (kMostElements - reach) / (size - 1))))
      fail("a tensor that is too large");
    elements *= std::max<std::int64_t>(size, 1);
    reach += size > 1 ? (size - 1) * stride : 0;
  }
}

void GraphDecoder::item(WrapperGeometry& geometry) {
  item(static_cast<StridedLayout&>(geometry));
  (*this)(geometry.dtype, geometry.device, geometry.wrapped_number);
}

Geometry GraphDecoder::read_geometry() {
  Geometry geometry;
  item(static_cast<StridedLayout&>(geometry));
  (*this)(geometry.dtype, geometry.device, geometry.conjugated, geometry.negated, geometry.symbolic);
  if (geometry.conjugated && !c10::isComplexType(geometry.dtype))
    fail("a conjugate of a tensor that is not complex");
  return geometry;
}

at::Tensor GraphDecoder::read_memory() {
  at::Device device = at::kCPU;
  item(device);
  const std::size_t size = in_.count();
  const std::span<const std::uint8_t> from = in_.take(size);
  at::Tensor bytes = at::empty({static_cast<std::int64_t>(size)}, at::kByte);
  if (size > 0) std::memcpy(bytes.data_ptr(), from.data(), size);
  try {
    return device.is_cpu() ? bytes : bytes.to(device);
  } catch (const c10::Error& error) {
    fail(fmt::format("a constant on {}, which this process cannot use: {}", device.str(),
                     error.what_without_backtrace()));
  }
}

at::Tensor GraphDecoder::read_tensor() {
  if (!in_.flag()) return {};
  const at::Tensor& memory = entry(memories_);
  const Geometry& geometry = entry(geometries_);
  std::int64_t end = geometry.storage_offset;
  bool empty = false;
  for (std::size_t i = 0; i < geometry.sizes.size(); ++i) {
    empty |= geometry.sizes[i] == 0;
    end += std::max<std::int64_t>(geometry.sizes[i] - 1, 0) * geometry.strides[i];
  }
  const auto item_bytes = static_cast<std::int64_t>(c10::elementSize(geometry.dtype));
  if (!empty && (end + 1) * item_bytes > memory.numel()) fail("a tensor that is larger than its memory");
  if (geometry.device != memory.device()) fail("a tensor on another device than its memory");
  const at::NoGradGuard no_grad;
  at::Tensor tensor = at::empty({0}, at::TensorOptions().dtype(geometry.dtype).device(memory.device()));
  tensor.set_(memory.storage(), empty ? 0 : geometry.storage_offset, geometry.sizes, geometry.strides);
  if (geometry.conjugated) tensor = tensor.conj();
  if (geometry.negated) tensor = tensor._neg_view();
  if (in_.flag()) {
    if (tensor.dim() != 0) fail("a number that is not a 0-dim tensor");
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return tensor;
}

ConstantKind GraphDecoder::read_kind() { return in_.choice(last_of(ConstantKind{})); }

void GraphDecoder::read_constant(Constant& constant) {
  constant.symbolic = in_.number<SymbolicId>();
  const ConstantKind kind = read_kind();
  if (kind != ConstantKind::ContextText) {
    constant.value = read_value(kind, 0);
    return;
  }
  std::string of = in_.text();
  const auto bytes = in_.take(in_.count());
  constant.text = ContextText{std::move(of), Bytes(bytes.begin(), bytes.end())};
}

template <class Decode>
auto GraphDecoder::by_codec(const Decode& decode) const {
  try {
    return decode();
  } catch (const StateError& error) {
    throw StateError(fmt::format("{}: {}", in_.name(), error.what()));
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

const ContextCodec& GraphDecoder::codec_of(const std::string& kind) const {
  const ContextCodec* codec = find_context_codec(kind);
  if (!codec)
    throw StateError(
        fmt::format("{}: a tensor subclass of kind '{}', for which this process has no codec; call "
                    "register_context_codec for it at the start of the program",
                    in_.name(), kind));
  return *codec;
}

const c10::IValue& GraphDecoder::value_of(Constant& constant) const {
  if (!constant.text) return constant.value;
  const ContextCodec& codec = codec_of(constant.text->kind);
  if (!codec.decode_text) fail("text of a context whose codec has none");
  constant.value = by_codec([&] { return codec.decode_text(constant.text->bytes, samples_); });
  constant.text.reset();
  return constant.value;
}

c10::IValue GraphDecoder::read_value(ConstantKind kind, int depth) {
  const auto list = [&](std::size_t least, const auto& each) {
    for (std::size_t left = in_.count(least); left > 0; --left) each();
  };
  switch (kind) {
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
    case ConstantKind::Device: {
      at::Device device = at::kCPU;
      item(device);
      return device;
    }
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
      if (depth >= kDeepest) fail("lists nested too deeply");
      c10::impl::GenericList items(c10::AnyType::get());
      list(1, [&] { items.push_back(read_value(read_kind(), depth + 1)); });
      return items;
    }
    case ConstantKind::StringList: {
      c10::List<std::string> items;
      list(1, [&] {
        const c10::IValue each = read_value(read_kind(), kDeepest);
        if (!each.isString()) fail("a list of strings that has something else");
        items.push_back(each.toStringRef());
      });
      return items;
    }
    case ConstantKind::Tensor:
      return entry(tensors_);
    case ConstantKind::ContextText:
      break;
  }
  fail("a constant of unknown kind, or text of a context in a list");
}

void GraphDecoder::check(const InputInfo& info) const {
  try {
    info.validate(0);
  } catch (const ValueError& error) {
    fail(error.what());
  }
}

void GraphDecoder::item(SizeExpression& expression) {
  std::vector<SizeExpression::Term> terms;
  std::int64_t divisor = 1;
  (*this)(terms, divisor);
  if (divisor < 1) fail("an expression with a divisor below 1");
  expression = SizeExpression(std::move(terms), divisor);
}

void GraphDecoder::item(SymbolSet& symbols) {
  std::vector<std::string> names;
  std::vector<SymbolSet::Quotient> quotients;
  (*this)(names, quotients);
  symbols = SymbolSet(std::move(names));
  for (SymbolSet::Quotient& quotient : quotients) {
    if (quotient.divisor < 1) fail("a quotient with a divisor below 1");
    check(quotient.numerator, symbols.variables());
    symbols.add_quotient(std::move(quotient.numerator), quotient.divisor);
  }
}

void GraphDecoder::check(const SizeExpression& expression, std::size_t variables) const {
  for (const SizeExpression::Term& term : expression.terms())
    if (term.exponents.size() > variables) fail("an expression of a variable that does not exist");
}

void GraphDecoder::check(const SymbolicTable& table) const {
  const std::size_t variables = table.symbols.variables();
  const auto check_number = [&](const NumberOrSize& number) {
    check(std::holds_alternative<SizeExpression>(number) ? std::get<SizeExpression>(number)
                                                         : std::get<NumberExpression>(number).size,
          variables);
  };
  const auto check_geometry = [&](const SymbolicGeometry& geometry) {
    if (geometry.sizes.size() != geometry.strides.size()) fail("a geometry with more sizes than strides");
    for (const auto* expressions : {&geometry.sizes, &geometry.strides})
      for (const auto& expression : *expressions)
        if (expression) check(*expression, variables);
    if (geometry.storage_offset) check(*geometry.storage_offset, variables);
  };
  for (const SymbolicConstant& constant : table.constants) {
    const auto numbers = numbers_of(constant.example);
    if (!numbers || numbers->size() != constant.numbers.size())
      fail("a symbolic constant with other numbers");
    // with_numbers() puts sizes where the example has integers.
    for (std::size_t i = 0; i < numbers->size(); ++i)
      if (std::holds_alternative<std::int64_t>((*numbers)[i]) !=
          std::holds_alternative<SizeExpression>(constant.numbers[i]))
        fail("a symbolic constant with a number of another type");
    for (const NumberOrSize& number : constant.numbers) check_number(number);
  }
  for (const SymbolicGeometry& geometry : table.geometries) check_geometry(geometry);
  for (const SymbolicTensor& tensor : table.tensors) {
    if (!tensor.example.defined()) fail("a symbolic tensor without an example");
    if (tensor.number) check_number(*tensor.number);
    check_geometry(tensor.part);
  }
}

void GraphDecoder::read_operand(Operand& operand, std::size_t values) {
  const auto id = [&](std::uint32_t number) {
    if (number > values) fail(fmt::format("value {} does not exist", number - 1));
    return ValueId{static_cast<std::int32_t>(number) - 1};
  };
  const auto word = in_.number<std::uint32_t>();
  const std::uint32_t payload = word >> 2;
  operand.kind = static_cast<Operand::Kind>(word & 3);
  switch (operand.kind) {
    case Operand::Kind::Constant: {
      if (payload >= constants_.size()) fail("a constant that does not exist");
      operand.constant = value_of(constants_[payload]);
      operand.symbolic = constants_[payload].symbolic;
      return;
    }
    case Operand::Kind::Tensor:
      operand.values.push_back(id(payload));
      return;
    case Operand::Kind::TensorList:
    case Operand::Kind::OptionalTensorList:
      if (payload > in_.remaining() / 4) fail("more values than the file has bytes for");
      operand.values.reserve(payload);
      for (std::uint32_t i = 0; i < payload; ++i) operand.values.push_back(id(in_.number<std::uint32_t>()));
      return;
  }
}

void GraphDecoder::item(Operand& operand) { read_operand(operand, std::numeric_limits<std::int32_t>::max()); }

ViewStep GraphDecoder::view_step() {
  ViewStep step{entry(operators_), {}, 0, 0, std::nullopt};
  (*this)(step.arguments, step.viewed, step.result, step.element);
  const auto& schema = step.op.schema();
  if (step.arguments.size() != schema.arguments().size() || step.viewed >= step.arguments.size() ||
      step.result >= schema.returns().size())
    fail("a view step that does not match its operator");
  for (const Operand& argument : step.arguments)
    for (const ValueId value : argument.values)
      if (value != kNoValue) fail("a view step with a tensor among its arguments");
  return step;
}

void GraphDecoder::item(Graph& graph) {
  graph = {};
  const auto table = in_.number<std::uint32_t>();
  if (table > tables_.size()) fail("a table of symbols that does not exist");
  if (table > 0) graph.table = tables_[table - 1];
  graph.storages = in_.number<std::int32_t>();
  const std::size_t count = in_.count(8);
  // Some memory is allocated for each storage later.
  if (graph.storages < 0 || static_cast<std::size_t>(graph.storages) > 4 * count + 16)
    fail("more storages than values");
  graph.values.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const Geometry& geometry = entry(geometries_);
    const auto storage = in_.number<std::int32_t>();
    if (storage < 0 || storage >= graph.storages) fail("invalid storage");
    Value& made = graph.values.emplace_back();
    made.geometry = geometry;
    made.storage = StorageId{storage};
  }
  const auto value = [&] {
    const auto id = in_.number<std::int32_t>();
    if (id < 0 || static_cast<std::size_t>(id) >= count) fail(fmt::format("value {} does not exist", id));
    return ValueId{id};
  };
  const auto symbolic = [&](SymbolicId id, std::size_t entries) {
    if (id != kNotSymbolic && (id < 0 || static_cast<std::size_t>(id) >= entries))
      fail("a reference to an entry of the table of symbols that does not exist");
  };
  const SymbolicTable* symbols = graph.table.get();
  for (std::size_t left = in_.count(12); left > 0; --left) {
    const ValueId id = value();
    graph.inputs.push_back({id, in_.text()});
  }
  for (std::size_t left = in_.count(12); left > 0; --left) {
    ConstantTensor constant{value(), entry(tensors_), kNotSymbolic};
    item(constant.symbolic);
    symbolic(constant.symbolic, symbols ? symbols->tensors.size() : 0);
    const Geometry& geometry = graph[constant.value].geometry;
    if (!constant.tensor.defined() || constant.tensor.sizes() != at::IntArrayRef(geometry.sizes) ||
        constant.tensor.scalar_type() != geometry.dtype)
      fail("a constant whose shape differs from its value's");
    graph.constants.push_back(std::move(constant));
  }
  const std::size_t nodes = in_.count(8);
  graph.nodes.reserve(nodes);
  for (std::size_t i = 0; i < nodes; ++i) {
    const auto head = in_.number<std::uint32_t>(), counts = in_.number<std::uint32_t>();
    if (head >> 2 >= operators_.size()) fail("an operator that does not exist");
    const std::size_t arguments = counts >> 16, results = counts & 0xffff;
    if (arguments + results > in_.remaining() / 4) fail("more operands than the file has bytes for");
    Node& node = graph.nodes.emplace_back(
        Node{operators_[head >> 2], {}, {}, static_cast<Phase>(head >> 1 & 1), (head & 1) != 0});
    node.arguments.resize(arguments);
    node.results.resize(results);
    for (Operand& operand : node.arguments) read_operand(operand, count);
    for (Operand& operand : node.results) read_operand(operand, count);
  }
  item(graph.outputs);
  for (const Operand& output : graph.outputs) {
    for (const ValueId id : output.values)
      if (id != kNoValue && index_of(id) >= count) fail("an output that does not exist");
    symbolic(output.symbolic, symbols ? symbols->constants.size() : 0);
  }
  if (!verifies_) return;
  try {
    verify(graph);
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

void GraphDecoder::item(FlattenRecord& record) {
  if (!in_.flag()) {
    PlainTensorMeta plain;
    item(plain);
    record = FlattenRecord(std::move(plain));
    return;
  }
  if (++depth_ > kDeepest) fail("subclasses nested too deeply");
  SubclassMeta meta;
  FlatWrapper flat;
  std::vector<std::uint8_t> context;
  (*this)(flat.kind, meta.first_flat, meta.count, meta.attributes, meta.outer, context);
  --depth_;
  std::size_t next = meta.first_flat;
  for (const auto& [name, attribute] : meta.attributes) {
    if (attribute.first_flat() != next) fail("a subclass with tensors at other places");
    next += attribute.count();
  }
  if (next != meta.first_flat + meta.count) fail("a subclass with another number of tensors");
  const ContextCodec& codec = codec_of(flat.kind);
  flat.geometry = meta.outer;
  for (const auto& [name, attribute] : meta.attributes) {
    at::Tensor inner;
    if (attribute.is_subclass()) {
      inner = attribute.subclass().sample();
    } else {
      if (!attribute.plain().geometry) fail("a subclass around something that is not a tensor");
      const Geometry& geometry = *attribute.plain().geometry;
      FakeMode fake;
      const ModeGuard guard(fake);
      inner = at::empty_strided(geometry.sizes, geometry.strides,
                                at::TensorOptions().dtype(geometry.dtype).device(geometry.device));
    }
    flat.tensors.emplace_back(name, std::move(inner));
  }
  const at::Tensor sample = by_codec([&] { return codec.decode(context, flat, samples_); });
  if (!is_subclass(sample) || payload_of(sample)->kind() != flat.kind)
    fail("a codec that returns another kind");
  meta.like = PayloadPtr::reclaim_copy(payload_of(sample));
  record = FlattenRecord(std::move(meta));
}

}  // namespace penstock::graph
