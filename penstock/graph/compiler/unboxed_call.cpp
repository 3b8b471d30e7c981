#include "penstock/graph/compiler/unboxed_call.h"

#include <ATen/ops/cat_ops.h>
#include <ATen/ops/convolution_backward_ops.h>
#include <ATen/ops/convolution_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/Exception.h>

#include <array>
#include <exception>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "penstock/base/describe.h"

namespace penstock::graph {
namespace {

using c10::IValue;

// LibTorch's type of text arguments, which differs between versions.
template <class Signature>
struct SecondParameter;
template <class Result, class First, class Second>
struct SecondParameter<Result(First, Second)> {
  using type = Second;
};
using TextView = SecondParameter<at::_ops::gelu::schema>::type;

using Numbers = c10::SmallVector<std::int64_t, 6>;
using Sizes = c10::SmallVector<c10::SymInt, 6>;

template <class List>
List numbers_in(const IValue& value) {
  List numbers;
  // A single number stands for a list of it, as in LibTorch's parser of arguments.
  if (value.isInt())
    numbers.push_back(value.toInt());
  else
    for (const IValue& element : value.toListRef()) numbers.push_back(element.toInt());
  return numbers;
}

// How a constant is held for a parameter type, and passed. `kLetter` stands for the type in signatures.
template <class Parameter>
struct Constant;

template <class T, char letter, T (*convert)(const IValue&)>
struct PlainConstant {
  static constexpr char kLetter = letter;
  using Held = T;
  static Held from(const IValue& value) { return convert(value); }
  static const T& pass(const Held& held) { return held; }
};
template <class T>
T converted(const IValue& value) {
  if constexpr (std::is_same_v<T, std::int64_t>) return value.toInt();
  if constexpr (std::is_same_v<T, c10::SymInt>) return c10::SymInt(value.toInt());
  if constexpr (std::is_same_v<T, double>) return value.toDouble();
  if constexpr (std::is_same_v<T, bool>) return value.toBool();
  if constexpr (std::is_same_v<T, at::Scalar>) return value.toScalar();
  if constexpr (std::is_same_v<T, at::ScalarType>) return value.toScalarType();
  if constexpr (std::is_same_v<T, at::Layout>) return value.toLayout();
  if constexpr (std::is_same_v<T, at::Device>) return value.toDevice();
  if constexpr (std::is_same_v<T, at::MemoryFormat>) return value.toMemoryFormat();
}
template <class T>
c10::optional<T> converted_if_any(const IValue& value) {
  if (value.isNone()) return c10::nullopt;
  return converted<T>(value);
}
template <class T, char letter>
using Number = PlainConstant<T, letter, &converted<T>>;
template <class T, char letter>
using OptionalNumber = PlainConstant<c10::optional<T>, letter, &converted_if_any<T>>;

template <>
struct Constant<std::int64_t> : Number<std::int64_t, 'i'> {};
template <>
struct Constant<c10::SymInt> : Number<c10::SymInt, 'y'> {};
template <>
struct Constant<double> : Number<double, 'd'> {};
template <>
struct Constant<bool> : Number<bool, 'b'> {};
template <>
struct Constant<const at::Scalar&> : Number<at::Scalar, 's'> {};
template <>
struct Constant<at::ScalarType> : Number<at::ScalarType, 't'> {};
template <>
struct Constant<c10::optional<std::int64_t>> : OptionalNumber<std::int64_t, 'I'> {};
template <>
struct Constant<c10::optional<c10::SymInt>> : OptionalNumber<c10::SymInt, 'Y'> {};
template <>
struct Constant<c10::optional<double>> : OptionalNumber<double, 'D'> {};
template <>
struct Constant<c10::optional<bool>> : OptionalNumber<bool, 'B'> {};
template <>
struct Constant<const c10::optional<at::Scalar>&> : OptionalNumber<at::Scalar, 'S'> {};
template <>
struct Constant<c10::optional<at::ScalarType>> : OptionalNumber<at::ScalarType, 'T'> {};
template <>
struct Constant<c10::optional<at::Layout>> : OptionalNumber<at::Layout, 'L'> {};
template <>
struct Constant<c10::optional<at::Device>> : OptionalNumber<at::Device, 'V'> {};
template <>
struct Constant<c10::optional<at::MemoryFormat>> : OptionalNumber<at::MemoryFormat, 'M'> {};
template <>
struct Constant<TextView> {
  static constexpr char kLetter = 'x';
  using Held = std::string;
  static Held from(const IValue& value) { return value.toStringRef(); }
  static TextView pass(const Held& held) { return TextView(held.data(), held.size()); }
};
template <>
struct Constant<at::IntArrayRef> {
  static constexpr char kLetter = 'n';
  using Held = Numbers;
  static Held from(const IValue& value) { return numbers_in<Numbers>(value); }
  static at::IntArrayRef pass(const Held& held) { return held; }
};
template <>
struct Constant<c10::SymIntArrayRef> {
  static constexpr char kLetter = 'z';
  using Held = Sizes;
  static Held from(const IValue& value) { return numbers_in<Sizes>(value); }
  static c10::SymIntArrayRef pass(const Held& held) { return {held.data(), held.size()}; }
};
template <>
struct Constant<at::OptionalIntArrayRef> {
  static constexpr char kLetter = 'N';
  using Held = std::optional<Numbers>;
  static Held from(const IValue& value) { return value.isNone() ? Held() : Held(numbers_in<Numbers>(value)); }
  static at::OptionalIntArrayRef pass(const Held& held) {
    return held ? at::OptionalIntArrayRef(at::IntArrayRef(*held)) : at::OptionalIntArrayRef();
  }
};
template <>
struct Constant<at::OptionalSymIntArrayRef> {
  static constexpr char kLetter = 'Z';
  using Held = std::optional<Sizes>;
  static Held from(const IValue& value) { return value.isNone() ? Held() : Held(numbers_in<Sizes>(value)); }
  static at::OptionalSymIntArrayRef pass(const Held& held) {
    return held ? at::OptionalSymIntArrayRef(c10::SymIntArrayRef(held->data(), held->size()))
                : at::OptionalSymIntArrayRef();
  }
};
template <std::size_t count>
struct Constant<std::array<bool, count>> {
  static constexpr char kLetter = static_cast<char>('0' + count);
  using Held = std::array<bool, count>;
  static Held from(const IValue& value) {
    Held held{};
    const c10::ArrayRef<IValue> list = value.toListRef();
    PENSTOCK_INVARIANT(list.size() == count, "an argument has another number of elements than its type");
    for (std::size_t i = 0; i < count; ++i) held[i] = list[i].toBool();
    return held;
  }
  static const Held& pass(const Held& held) { return held; }
};

// Reads one argument of a call. Lives as long as the call.
template <class Parameter>
class Reader {
 public:
  static constexpr char kLetter = Constant<Parameter>::kLetter;
  // Sets `constant` to what `read` will find in Argument::constant. Returns false for an argument of another
  // kind; throws c10::Error, or std::runtime_error, for a value of another type.
  static bool prepare(const Argument& argument, PlanMemory& memory, const void*& constant) {
    if (argument.kind == Argument::Kind::Symbolic) return true;
    if (argument.kind != Argument::Kind::Constant) return false;
    constant = memory.make<Held>(Constant<Parameter>::from(*static_cast<const IValue*>(argument.constant)));
    return true;
  }
  Parameter read(const Argument& argument, Frame& frame) {
    if (argument.kind == Argument::Kind::Constant)
      return Constant<Parameter>::pass(*static_cast<const Held*>(argument.constant));
    evaluated_.emplace(Constant<Parameter>::from(frame.sizes->constants[argument.slot]));
    return Constant<Parameter>::pass(*evaluated_);
  }

 private:
  using Held = typename Constant<Parameter>::Held;
  std::optional<Held> evaluated_;  // of an argument that depends on sizes
};

bool prepare_tensor(const Argument& argument, PlanMemory& /*memory*/, const void*& /*constant*/) {
  return argument.kind == Argument::Kind::Tensor;
}

template <class Tensor>
struct TensorReader {
  static constexpr char kLetter = 'a';
  static constexpr auto prepare = &prepare_tensor;
  Tensor read(const Argument& argument, Frame& frame) { return frame.slots[argument.slot]; }
};
template <>
class Reader<const at::Tensor&> : public TensorReader<const at::Tensor&> {};
template <>
class Reader<at::Tensor&> : public TensorReader<at::Tensor&> {
 public:
  static constexpr char kLetter = 'w';
};
template <>
class Reader<const c10::optional<at::Tensor>&> {
 public:
  static constexpr char kLetter = 'A';
  static bool prepare(const Argument& argument, PlanMemory& /*memory*/, const void*& /*constant*/) {
    return argument.kind == Argument::Kind::Tensor ||
           (argument.kind == Argument::Kind::Constant &&
            static_cast<const IValue*>(argument.constant)->isNone());
  }
  const c10::optional<at::Tensor>& read(const Argument& argument, Frame& frame) {
    if (argument.kind == Argument::Kind::Tensor) tensor_ = frame.slots[argument.slot];
    return tensor_;
  }

 private:
  c10::optional<at::Tensor> tensor_;
};

// Lists use the frame's storage: at most one of them is an argument of a signature in the table.
class ListReader {
 public:
  static bool prepare(const Argument& argument, PlanMemory& /*memory*/, const void*& /*constant*/) {
    return argument.kind == Argument::Kind::List;
  }

 protected:
  at::TensorList gather(const Argument& argument, Frame& frame) {
    frame.list.clear();
    for (const Slot slot : frame.plan->lists[argument.slot]) frame.list.push_back(frame.slots[slot]);
    return frame.list;
  }
};
template <>
class Reader<at::TensorList> : public ListReader {
 public:
  static constexpr char kLetter = 'l';
  at::TensorList read(const Argument& argument, Frame& frame) { return gather(argument, frame); }
};
// Of `cat`, whose schema does not tell it from the above.
template <>
class Reader<const at::ITensorListRef&> : public ListReader {
 public:
  static constexpr char kLetter = 'c';
  const at::ITensorListRef& read(const Argument& argument, Frame& frame) {
    return list_.emplace(gather(argument, frame));
  }

 private:
  std::optional<at::ITensorListRef> list_;
};

void put(const Result& result, at::Tensor&& tensor, Frame& frame) {
  if (result.kind == Result::Kind::Tensor) frame.slots[result.slot] = std::move(tensor);
}

// The letters of what is returned.
template <class Returned>
inline constexpr std::string_view kReturnLetters =
    std::string_view("aaaaa").substr(0, std::tuple_size_v<Returned>);
template <>
inline constexpr std::string_view kReturnLetters<at::Tensor> = "a";
template <>
inline constexpr std::string_view kReturnLetters<at::Tensor&> = "w";
template <>
inline constexpr std::string_view kReturnLetters<std::vector<at::Tensor>> = "l";

using Prepare = bool (*)(const Argument& argument, PlanMemory& memory, const void*& constant);

}  // namespace

// What is the same for all operators with one signature.
struct UnboxedSignature {
  StepCall call;
  // A typed handle of an operator; throws c10::Error if it is implemented with other types.
  const void* (*bind)(const c10::OperatorHandle& op, PlanMemory& memory);
  std::span<const Prepare> parameters;
};

namespace {

template <class Signature>
struct Caller;
template <class Returned, class... Parameters>
struct Caller<Returned(Parameters...)> {
  using Handle = c10::TypedOperatorHandle<Returned(Parameters...)>;

  static constexpr char kParameters[] = {Reader<Parameters>::kLetter..., '>'};
  static std::string letters() {
    return std::string(kParameters, sizeof kParameters).append(kReturnLetters<Returned>);
  }

  static void call(const Step& step, Frame& frame) {
    call_with(step, frame, std::index_sequence_for<Parameters...>{});
  }
  static const void* bind(const c10::OperatorHandle& op, PlanMemory& memory) {
    return memory.make<Handle>(op.typed<Returned(Parameters...)>());
  }
  static constexpr Prepare kPrepare[] = {Reader<Parameters>::prepare...};
  static constexpr UnboxedSignature kSignature{&call, &bind, kPrepare};

 private:
  template <std::size_t... I>
  static void call_with(const Step& step, Frame& frame, std::index_sequence<I...>) {
    std::tuple<Reader<Parameters>...> readers;
    const auto run = [&]() -> Returned {
      return static_cast<const Handle*>(step.handle)
          ->call(std::get<I>(readers).read(step.arguments[I], frame)...);
    };
    if constexpr (std::is_same_v<Returned, at::Tensor>) {
      put(step.results[0], run(), frame);
    } else if constexpr (std::is_same_v<Returned, at::Tensor&>) {
      // The argument that was written. If its geometry has changed, the result has a slot of its own.
      const at::Tensor& written = run();
      if (step.results[0].kind == Result::Kind::Tensor) {
        at::Tensor& kept = frame.slots[step.results[0].slot];
        if (!kept.is_same(written)) kept = written;
      }
    } else if constexpr (std::is_same_v<Returned, std::vector<at::Tensor>>) {
      std::vector<at::Tensor> tensors = run();
      if (step.results[0].kind == Result::Kind::List) {
        const std::span<const Slot> slots = frame.plan->lists[step.results[0].slot];
        PENSTOCK_INVARIANT(tensors.size() == slots.size(),
                           "an operator returned a list of a different length than recorded");
        for (std::size_t i = 0; i < slots.size(); ++i)
          if (slots[i] != kNoSlot) frame.slots[slots[i]] = std::move(tensors[i]);
      }
    } else {
      Returned tensors = run();
      [&]<std::size_t... J>(std::index_sequence<J...>) {
        (put(step.results[J], std::move(std::get<J>(tensors)), frame), ...);
      }
      (std::make_index_sequence<std::tuple_size_v<Returned>>{});
    }
    frame.list.clear();
  }
};

// ---- the table ----

using Table = std::map<std::string, const UnboxedSignature*, std::less<>>;

// The signature with whole numbers where it has sizes: operators take the one or the other, depending on the
// version of LibTorch.
template <class T>
struct Whole {
  using type = T;
};
template <>
struct Whole<c10::SymInt> {
  using type = std::int64_t;
};
template <>
struct Whole<c10::SymIntArrayRef> {
  using type = at::IntArrayRef;
};
template <>
struct Whole<c10::optional<c10::SymInt>> {
  using type = c10::optional<std::int64_t>;
};
template <>
struct Whole<at::OptionalSymIntArrayRef> {
  using type = at::OptionalIntArrayRef;
};
template <class Returned, class... Parameters>
struct Whole<Returned(Parameters...)> {
  using type = Returned(typename Whole<Parameters>::type...);
};

template <class... Signatures>
void add(Table& table) {
  (table.try_emplace(Caller<Signatures>::letters(), &Caller<Signatures>::kSignature), ...);
}
template <class... Signatures>
void add_with_sizes(Table& table) {
  add<Signatures...>(table);
  add<typename Whole<Signatures>::type...>(table);
}

using T = const at::Tensor&;
using Written = at::Tensor&;
using S = const at::Scalar&;
using Size = c10::SymInt;
using SizeList = c10::SymIntArrayRef;
template <class U>
using Maybe = c10::optional<U>;
using MaybeTensor = const Maybe<at::Tensor>&;
using Dims = at::IntArrayRef;
using Whole64 = std::int64_t;
using Tensors2 = std::tuple<at::Tensor, at::Tensor>;
using Tensors3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Tensors5 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using TensorVector = std::vector<at::Tensor>;
using Dtype = Maybe<at::ScalarType>;
using Layout = Maybe<at::Layout>;
using Device = Maybe<at::Device>;
using Pinned = Maybe<bool>;
using Format = Maybe<at::MemoryFormat>;

Table make_table() {
  Table table;
  add<at::Tensor(T), at::Tensor(T, T), at::Tensor(T, T, T), at::Tensor(T, S), at::Tensor(T, S, S),
      at::Tensor(T, T, S), at::Tensor(T, T, T, S), at::Tensor(T, T, T, S, S), at::Tensor(T, T, TextView),
      at::Tensor(T, TextView), at::Tensor(T, const Maybe<at::Scalar>&, const Maybe<at::Scalar>&)>(table);
  add<at::Tensor(T, Whole64), at::Tensor(T, Whole64, bool), at::Tensor(T, T, Whole64),
      at::Tensor(T, T, T, Whole64), at::Tensor(T, T, Whole64, at::ScalarType), at::Tensor(T, Whole64, T),
      at::Tensor(T, Whole64, T, T), at::Tensor(T, Whole64, T, bool)>(table);
  // Views and factories.
  add_with_sizes<at::Tensor(T, SizeList), at::Tensor(T, SizeList, bool), at::Tensor(T, SizeList, SizeList),
                 at::Tensor(T, SizeList, SizeList, Maybe<Size>), at::Tensor(T, Whole64, Size),
                 at::Tensor(T, T, Whole64, Size), at::Tensor(T, T, SizeList, SizeList, Maybe<Size>),
                 at::Tensor(T, T, Whole64, Maybe<Size>, Maybe<Size>, Size),
                 at::Tensor(T, Whole64, Maybe<Size>, Maybe<Size>, Size),
                 at::Tensor(T, SizeList, Whole64, Size), at::Tensor(T, SizeList, Whole64, Size, Size, Size),
                 at::Tensor(T, T, Size, bool, bool), at::Tensor(T, T, Size, Size, bool),
                 TensorVector(T, Size, Whole64), TensorVector(T, SizeList, Whole64)>(table);
  add<at::Tensor(T, T, Size, Whole64, bool), TensorVector(T, Whole64)>(table);
  add_with_sizes<at::Tensor(SizeList, Dtype, Layout, Device, Pinned),
                 at::Tensor(SizeList, Dtype, Layout, Device, Pinned, Format),
                 at::Tensor(SizeList, S, Dtype, Layout, Device, Pinned),
                 at::Tensor(T, SizeList, Dtype, Layout, Device, Pinned),
                 at::Tensor(T, SizeList, S, Dtype, Layout, Device, Pinned)>(table);
  add<at::Tensor(T, Dtype, Layout, Device, Pinned, Format),
      at::Tensor(T, S, Dtype, Layout, Device, Pinned, Format),
      at::Tensor(T, Dtype, Layout, Device, Pinned, bool, Format), at::Tensor(T, Format),
      at::Tensor(T, T, bool)>(table);
  // Reductions, normalization, lists.
  add<at::Tensor(T, Dtype), at::Tensor(T, at::OptionalIntArrayRef, bool, Dtype), at::Tensor(T, Dims, bool),
      at::Tensor(T, Dims, bool, Dtype), at::Tensor(at::TensorList, Whole64), at::_ops::cat::schema>(table);
  add_with_sizes<Tensors3(T, SizeList, MaybeTensor, MaybeTensor, double),
                 Tensors3(T, T, SizeList, T, T, MaybeTensor, MaybeTensor, std::array<bool, 3>)>(table);
  add<Tensors3(T, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, bool, double, double),
      Tensors3(T, T, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, bool, double,
               std::array<bool, 3>),
      Tensors5(T, MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor, bool, double, double),
      Tensors2(T, double, Maybe<bool>), at::_ops::convolution::schema,
      at::_ops::convolution_backward::schema>(table);
  // Operators that write.
  add<Written(Written), Written(Written, Whole64, Whole64), Written(Written, T), Written(Written, S),
      Written(Written, S, S), Written(Written, T, S), Written(Written, T, bool), Written(T, Written),
      Written(T, T, Written), Written(T, S, Written), Written(T, T, S, Written),
      Written(T, TextView, Written), Written(T, T, TextView, Written), Written(T, T, T, S, Written)>(table);
  return table;
}

// ---- signatures of schemas ----

char upper(char letter) { return static_cast<char>(letter - 'a' + 'A'); }

// '\0' for types that no signature of the table has.
char letter_of(const c10::Type& type, c10::optional<std::int32_t> length) {
  using Kind = c10::TypeKind;
  switch (type.kind()) {
    case Kind::TensorType:
      return 'a';
    case Kind::IntType:
      return 'i';
    case Kind::SymIntType:
      return 'y';
    case Kind::FloatType:
      return 'd';
    case Kind::BoolType:
      return 'b';
    case Kind::NumberType:
      return 's';
    case Kind::ScalarTypeType:
      return 't';
    case Kind::LayoutType:
      return 'l';
    case Kind::DeviceObjType:
      return 'v';
    case Kind::MemoryFormatType:
      return 'm';
    case Kind::StringType:
      return 'x';
    case Kind::ListType: {
      const Kind element = type.containedType(0)->kind();
      if (element == Kind::TensorType) return 'l';
      if (element == Kind::IntType) return 'n';
      if (element == Kind::SymIntType) return 'z';
      if (element == Kind::BoolType && length && *length > 0 && *length < 10)
        return static_cast<char>('0' + *length);
      return '\0';
    }
    case Kind::OptionalType: {
      const c10::Type& inner = *type.containedType(0);
      const char letter = letter_of(inner, length);
      const bool list_of_tensors = inner.kind() == Kind::ListType && letter == 'l';
      return letter >= 'a' && letter <= 'z' && letter != 'x' && !list_of_tensors ? upper(letter) : '\0';
    }
    default:
      return '\0';
  }
}

// "aas>a" for (Tensor, Tensor, Scalar) -> Tensor; empty if some type has no letter.
std::string letters_of(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  const OperatorTraits& traits = traits_of(op);
  const bool joins = op.operator_name().name == "aten::cat";
  std::string letters;
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const c10::Type& type = *argument.real_type();
    char letter = letter_of(type, argument.N());
    if (type.kind() == c10::TypeKind::LayoutType || type.kind() == c10::TypeKind::DeviceObjType ||
        type.kind() == c10::TypeKind::MemoryFormatType)
      letter = '\0';  // only as optional ones
    if (joins && letter == 'l') letter = 'c';
    if (traits.arguments[i].written) letter = letter == 'a' ? 'w' : '\0';
    if (letter == '\0') return {};
    letters.push_back(letter);
  }
  letters.push_back('>');
  for (std::size_t i = 0; i < schema.returns().size(); ++i) {
    const char letter = letter_of(*schema.returns()[i].real_type(), c10::nullopt);
    if (letter != 'a' && letter != 'l') return {};
    const bool written = traits.returns[i].kind == ReturnAlias::Kind::Same;
    letters.push_back(written ? (letter == 'a' ? 'w' : '\0') : letter);
  }
  return letters;
}

}  // namespace

UnboxedForm unboxed_form(const c10::OperatorHandle& op, PlanMemory& memory) {
  // Operators of others may be implemented with any types that their schema allows.
  const std::string& name = op.operator_name().name;
  if (!name.starts_with("aten::") && !name.starts_with("penstock::")) return {};
  static const Table table = make_table();
  const auto found = table.find(letters_of(op));
  if (found == table.end()) return {};
  try {
    return {found->second, found->second->bind(op, memory)};
  } catch (const std::exception&) {
    return {};
  }
}

bool make_unboxed(Step& step, const UnboxedForm& form, PlanMemory& memory) {
  if (!form.signature) return false;
  const std::span<const Prepare> parameters = form.signature->parameters;
  c10::SmallVector<const void*, 16> constants(parameters.size(), nullptr);
  try {
    for (std::size_t i = 0; i < parameters.size(); ++i)
      if (!parameters[i](step.arguments[i], memory, constants[i])) return false;
  } catch (const std::exception&) {
    return false;  // a value of another type than its parameter
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) step.arguments[i].constant = constants[i];
  step.call = form.signature->call;
  step.handle = form.handle;
  return true;
}

}  // namespace penstock::graph
