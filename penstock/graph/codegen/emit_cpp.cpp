#include "penstock/graph/codegen/emit_cpp.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "penstock/base/describe.h"
#include "penstock/graph/codegen/loop_text.h"
#include "penstock/graph/codegen/row_passes.h"

namespace penstock::graph {
namespace {

// What all kernels use. No names of the C library: the code is compiled without headers.
constexpr std::string_view kPrelude =
    R"cpp(typedef __INT64_TYPE__ i64;
          typedef __INT32_TYPE__ i32;
          typedef __INT16_TYPE__ i16;
          typedef __INT8_TYPE__ i8;
          typedef __UINT32_TYPE__ u32;
          typedef __UINT16_TYPE__ u16;
          typedef __UINT8_TYPE__ u8;
#define INLINE static inline __attribute__((always_inline))
          INLINE u32 bits_of(float x) {
            u32 b;
            __builtin_memcpy(&b, &x, 4);
            return b;
          }
          INLINE float float_of(u32 b) {
            float x;
            __builtin_memcpy(&x, &b, 4);
            return x;
          }
          INLINE float from_bfloat16(u16 h) { return float_of((u32)h << 16); }
          INLINE u16 to_bfloat16(float x) {
            const u32 b = bits_of(x);
            return (u16)(x != x ? 0x7fc0u : (b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
          }
          INLINE float from_half(u16 h) {
            const u32 w = (u32)h << 16, sign = w & 0x80000000u, twice = w + w;
            const float normal = float_of((twice >> 4) + (0xe0u << 23)) * 0x1.0p-112f;
            const float small = float_of((twice >> 17) | (126u << 23)) - 0.5f;
            return float_of(sign | (twice < (1u << 27) ? bits_of(small) : bits_of(normal)));
          }
          INLINE u16 to_half(float x) {
            const float base = (__builtin_fabsf(x) * 0x1.0p+112f) * 0x1.0p-110f;
            const u32 w = bits_of(x), twice = w + w, sign = w & 0x80000000u;
            const u32 exponent = twice & 0xff000000u, bias = exponent < 0x71000000u ? 0x71000000u : exponent;
            const u32 b = bits_of(float_of((bias >> 1) + 0x07800000u) + base);
            const u32 rest = ((b >> 13) & 0x7c00u) + (b & 0xfffu);
            return (u16)((sign >> 16) | (twice > 0xff000000u ? 0x7e00u : rest));
          }
          INLINE float power_of_two(i32 n) { return float_of((u32)(n + 127) << 23); }
          INLINE float exp_of(float given) {
            const float low = given < -104.0f ? -104.0f : given, x = low > 89.0f ? 89.0f : low;
            const float t = x * 1.44269504f + 12582912.0f, n = t - 12582912.0f;
            const i32 k = (i32)bits_of(t) - 0x4b400000, half = k >> 1;
            const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
            const float p =
                ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) *
                     r +
                 1.6666665459e-1f) *
                    r +
                5.0000001201e-1f;
            return ((p * (r * r) + r) + 1.0f) * power_of_two(half) * power_of_two(k - half);
          }
          INLINE float log_of(float x) {
            const bool tiny = x < 1.17549435e-38f;
            const u32 b = bits_of(tiny ? x * 8388608.0f : x);
            const float m = float_of((b & 0x007fffffu) | 0x3f000000u);
            const bool lower = m < 0.707106781f;
            const float e = (float)((i32)(b >> 23) - (lower ? 127 : 126) - (tiny ? 23 : 0));
            const float r = lower ? (m + m) - 1.0f : m - 1.0f, z = r * r;
            const float p = ((((((((7.0376836292e-2f * r - 1.1514610310e-1f) * r + 1.1676998740e-1f) * r -
                                  1.2420140846e-1f) *
                                     r +
                                 1.4249322787e-1f) *
                                    r -
                                1.6668057665e-1f) *
                                   r +
                               2.0000714765e-1f) *
                                  r -
                              2.4999993993e-1f) *
                                 r +
                             3.3333331174e-1f) *
                            r * z;
            const float y = (r + ((p + -2.12194440e-4f * e) - 0.5f * z)) + 0.693359375f * e;
            const float finite = x == 0.0f ? -__builtin_inff() : (x < 0.0f ? __builtin_nanf("") : y);
            return (x == __builtin_inff()) | (x != x) ? x : finite;
          }
          INLINE float tanh_of(float x) {
            const float a = __builtin_fabsf(x), z = x * x;
            const float p = ((((-5.70498872745e-3f * z + 2.06390887954e-2f) * z - 5.37397155531e-2f) * z +
                              1.33314422036e-1f) *
                                 z -
                             3.33332819422e-1f) *
                                z * x +
                            x;
            const float y = 1.0f - 2.0f / (exp_of(a + a) + 1.0f);
            return a < 0.625f ? p : (x < 0.0f ? -y : y);
          }
          INLINE float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }
          INLINE float erf_of(float given) {
            const float low = given < -4.0f ? -4.0f : given, x = low > 4.0f ? 4.0f : low, z = x * x;
            const float p =
                (((((-2.72614225801306e-10f * z + 2.77068142495902e-08f) * z - 2.10102402082508e-06f) * z -
                   5.69250639462346e-05f) *
                      z -
                  7.34990630326855e-04f) *
                     z -
                 2.95459980854025e-03f) *
                    z -
                1.60960333262415e-02f;
            const float q =
                (((-1.45660718464996e-05f * z - 2.13374055278905e-04f) * z - 1.68282697438203e-03f) * z -
                 7.37332916720468e-03f) *
                    z -
                1.42647390514189e-02f;
            return x * p / q;
          }
    )cpp";

constexpr std::int64_t kLongestSum = 4096;   // of one float
constexpr std::int64_t kRowsOfOneSum = 128;  // the same, of Columns

class FunctionEmitter {
 public:
  explicit FunctionEmitter(const NamedKernel& named)
      : named_(named), kernel_(named.kernel), inner_(kernel_.first_inner_dim()) {}

  std::string emit() {
    if (!named_.comment.empty()) line("// " + named_.comment);
    line(fmt::format("extern \"C\" void {}(void* const* buffers, i64 begin, i64 end) {{", named_.name));
    ++depth_;
    for (std::size_t i = 0; i < kernel_.buffers.size(); ++i) {
      const LoopBuffer& buffer = kernel_.buffers[i];
      const std::string_view constant = buffer.written ? "" : "const ";
      line(fmt::format("{0}{1}* const p{2} = ({0}{1}*)buffers[{2}];", constant, memory_type(buffer.type), i));
    }
    switch (kernel_.form) {
      case LoopForm::Elements:
        kernel_.sizes.size() == 1 ? emit_one_loop() : emit_elements();
        break;
      case LoopForm::Rows:
        emit_rows();
        break;
      case LoopForm::Columns:
        emit_columns();
        break;
    }
    --depth_;
    line("}");
    return std::move(text_);
  }

 private:
  void line(const std::string& text) {
    text_.append(2 * depth_, ' ');
    text_ += text;
    text_ += '\n';
  }
  void open(const std::string& text) {
    line(text + " {");
    ++depth_;
  }
  void close() {
    --depth_;
    line("}");
  }

  // The place in loops [first, end), counted by `variable`, as the addresses q0, q1, ... of the buffers from
  // `base`.
  void addresses(std::size_t first, std::size_t end, const std::string& variable, std::string_view base,
                 std::string_view name, const std::string& more = {}) {
    std::vector<std::string> index(kernel_.sizes.size());
    std::string rest = variable;
    for (std::size_t d = end; d-- > first;) {
      index[d] = fmt::format("{}i{}", name, d);
      if (d == first) {
        line(fmt::format("const i64 {} = {};", index[d], rest));
      } else {
        line(fmt::format("const i64 {} = {} % {}ll;", index[d], rest,
                         std::max<std::int64_t>(1, kernel_.sizes[d])));
        const std::string next = fmt::format("{}r{}", name, d);
        line(fmt::format("const i64 {} = {} / {}ll;", next, rest,
                         std::max<std::int64_t>(1, kernel_.sizes[d])));
        rest = next;
      }
    }
    for (std::size_t i = 0; i < kernel_.buffers.size(); ++i) {
      const LoopBuffer& buffer = kernel_.buffers[i];
      std::string offset;
      for (std::size_t d = first; d < end; ++d)
        if (buffer.strides[d] != 0) offset += " + " + index_text(index[d], buffer.strides[d]);
      if (!more.empty() && buffer.strides.back() != 0)
        offset += " + " +
                  (buffer.strides.back() == 1 ? more : fmt::format("{} * {}ll", more, buffer.strides.back()));
      line(fmt::format("{}{}* const {}{} = {}{}{};", buffer.written ? "" : "const ", memory_type(buffer.type),
                       name, i, base, i, offset));
    }
  }

  std::string loaded(std::size_t buffer, std::string_view base, const std::string& index) const {
    return loaded_text(kernel_.buffers[buffer].type, fmt::format("{}{}[{}]", base, buffer, index));
  }
  std::string stored(const LoopStore& store) const {
    return stored_text(kernel_.buffers[store.buffer].type, fmt::format("v{}", store.value));
  }

  // The text of what an instruction computes. Loads are of `base` at the innermost index `variable`.
  std::string computed(std::size_t i, std::string_view base, std::string_view variable) const {
    const LoopInstruction& instruction = kernel_.instructions[i];
    if (instruction.op == LoopOp::Load)
      return loaded(
          instruction.buffer, base,
          index_text(variable, variable.empty() ? 0 : kernel_.buffers[instruction.buffer].strides.back()));
    if (instruction.op == LoopOp::Position) return "(i64)j";
    return instruction_text(kernel_, i);
  }

  void value(std::size_t i, const std::string& text) {
    line(fmt::format("const {} v{} = {};", value_type(kernel_.instructions[i].type), i, text));
  }

  // What does not change in the inner loop.
  void uniform_values(const std::vector<char>& varies, std::string_view base) {
    for (std::size_t i = 0; i < varies.size(); ++i)
      if (!varies[i] && !is_reduction(kernel_.instructions[i].op)) value(i, computed(i, base, ""));
  }

  void store(const LoopStore& each, std::string_view base, std::string_view variable) {
    const std::int64_t stride = variable.empty() ? 0 : kernel_.buffers[each.buffer].strides.back();
    line(fmt::format("{}{}[{}] = {};", base, each.buffer, index_text(variable, stride), stored(each)));
  }

  void inner_loop(const std::vector<char>& varies, const std::string& first, const std::string& end,
                  std::string_view base) {
    line("#pragma omp simd");
    open(fmt::format("for (i64 j = {}; j < {}; ++j)", first, end));
    for (std::size_t i = 0; i < varies.size(); ++i)
      if (varies[i]) value(i, computed(i, base, "j"));
    for (const LoopStore& each : kernel_.stores) store(each, base, "j");
    close();
  }

  void emit_one_loop() {
    const std::vector<char> varies = varies_in_row(kernel_);
    line("if (begin >= end) return;");
    uniform_values(varies, "p");
    inner_loop(varies, "begin", "end", "p");
  }

  void emit_elements() {
    const std::vector<char> varies = varies_in_row(kernel_);
    open("for (i64 u = begin; u < end; ++u)");
    addresses(0, inner_, "u", "p", "q");
    if (kernel_.sizes.back() > 0) {
      uniform_values(varies, "q");
      inner_loop(varies, "0", fmt::format("{}ll", kernel_.sizes.back()), "q");
    }
    close();
  }

  // ---- rows ----

  std::string_view sum_type(ElementType type) const {
    return type == ElementType::Float ? std::string_view("double") : value_type(type);
  }

  void declare_reduction(std::size_t i) {
    const LoopInstruction& reduction = kernel_.instructions[i];
    const std::string_view type = value_type(reduction.type);
    if (reduction.op == LoopOp::RowSum) {
      line(fmt::format("{} t{} = 0;", sum_type(reduction.type), i));
      return;
    }
    const bool maximum = reduction.op == LoopOp::RowMaximum;
    if (is_float(reduction.type)) {
      line(fmt::format("{} m{} = {}__builtin_inf();", type, i, maximum ? "-" : ""));
      line(fmt::format("i32 n{} = 0;", i));
    } else {
      // The least and the largest number of the type.
      const auto bits = static_cast<unsigned>(8 * bytes_of(reduction.type));
      const bool is_unsigned = reduction.type == ElementType::UInt8;
      const std::string largest = is_unsigned ? "255" : fmt::format("(i64)(~0ull >> {})", 65 - bits);
      const std::string least = is_unsigned ? "0" : fmt::format("(-{} - 1)", largest);
      line(fmt::format("{} m{} = ({})({});", type, i, type, maximum ? least : largest));
    }
  }
  void finish_reduction(std::size_t i) {
    const LoopInstruction& reduction = kernel_.instructions[i];
    if (reduction.op == LoopOp::RowSum)
      value(i, fmt::format("({})t{}", value_type(reduction.type), i));
    else if (is_float(reduction.type))
      value(i, fmt::format("n{0} ? ({1})__builtin_nan(\"\") : m{0}", i, value_type(reduction.type)));
    else
      value(i, fmt::format("m{}", i));
  }

  // The loops over one row. `pass`: what to compute.
  void emit_pass(const RowPasses& passes, std::size_t pass) {
    const std::vector<std::size_t> computed_here = passes.computed_in(pass);
    const std::vector<std::size_t>& reductions = passes.reductions[pass];
    for (const std::size_t i : reductions) declare_reduction(i);
    const std::size_t dims = kernel_.sizes.size(), last = dims - 1;
    std::string base = "q", place;
    std::size_t opened = 0;
    if (inner_ < last) {
      open(fmt::format("for (i64 w = 0; w < {}ll; ++w)", kernel_.product(inner_, last)));
      ++opened;
      addresses(inner_, last, "w", "q", "x");
      base = "x";
      place = fmt::format("w * {}ll + j", kernel_.sizes[last]);
    } else {
      place = "j";
    }
    std::string first = "0", end = fmt::format("{}ll", kernel_.sizes[last]);
    const bool has_float_sum = std::any_of(reductions.begin(), reductions.end(), [&](std::size_t i) {
      return kernel_.instructions[i].op == LoopOp::RowSum &&
             kernel_.instructions[i].type == ElementType::Float;
    });
    if (has_float_sum && kernel_.sizes[last] > kLongestSum) {
      open(fmt::format("for (i64 c = 0; c < {0}ll; c += {1}ll)", kernel_.sizes[last], kLongestSum));
      ++opened;
      line(fmt::format("const i64 e = c + {0}ll < {1}ll ? c + {0}ll : {1}ll;", kLongestSum,
                       kernel_.sizes[last]));
      first = "c";
      end = "e";
    }
    std::string pragma = "#pragma omp simd";
    for (const std::size_t i : reductions) {
      const LoopInstruction& reduction = kernel_.instructions[i];
      if (reduction.op == LoopOp::RowSum) {
        line(fmt::format("{} s{} = 0;", value_type(reduction.type), i));
        pragma += fmt::format(" reduction(+ : s{})", i);
      } else {
        pragma += fmt::format(" reduction({} : m{})", reduction.op == LoopOp::RowMaximum ? "max" : "min", i);
        if (is_float(reduction.type)) pragma += fmt::format(" reduction(| : n{})", i);
      }
    }
    line(pragma);
    open(fmt::format("for (i64 j = {}; j < {}; ++j)", first, end));
    for (const std::size_t i : computed_here) {
      if (passes.is_kept_before(i, pass)) {
        value(i, fmt::format("kept{}[{}]", i, place));
        continue;
      }
      value(i, computed(i, base, "j"));
      if (passes.is_kept_by(i, pass)) line(fmt::format("kept{0}[{1}] = v{0};", i, place));
    }
    for (const std::size_t i : reductions) {
      const LoopInstruction& reduction = kernel_.instructions[i];
      const std::string v = operand_text(reduction, 0);
      if (reduction.op == LoopOp::RowSum) {
        line(fmt::format("s{0} += {1};", i, v));
      } else {
        line(fmt::format("m{0} = {1} {2} m{0} ? {1} : m{0};", i, v,
                         reduction.op == LoopOp::RowMaximum ? ">" : "<"));
        if (is_float(reduction.type)) line(fmt::format("n{0} |= (i32)({1} != {1});", i, v));
      }
    }
    for (const LoopStore& each : passes.stores[pass]) store(each, base, "j");
    close();
    for (const std::size_t i : reductions)
      if (kernel_.instructions[i].op == LoopOp::RowSum) line(fmt::format("t{0} += s{0};", i));
    while (opened-- > 0) close();
    for (const std::size_t i : reductions) finish_reduction(i);
  }

  void emit_rows() {
    const RowPasses passes(kernel_);
    const std::int64_t row = kernel_.product(inner_, kernel_.sizes.size());
    for (std::size_t i = 0; i < kernel_.instructions.size(); ++i)
      if (passes.kept_in[i] != kNotKept)
        line(fmt::format("alignas(64) {} kept{}[{}];", memory_type(kernel_.instructions[i].type), i,
                         std::max<std::int64_t>(1, row)));
    open("for (i64 u = begin; u < end; ++u)");
    addresses(0, inner_, "u", "p", "q");
    for (std::size_t pass = 0; pass < passes.passes; ++pass) {
      for (std::size_t i = 0; i < passes.depth.size(); ++i)
        if (passes.depth[i] == pass && !passes.varies[i] && !is_reduction(kernel_.instructions[i].op))
          value(i, computed(i, "q", ""));
      if (passes.has_loop(pass)) emit_pass(passes, pass);
    }
    for (const LoopStore& each : passes.once) store(each, "q", "");
    close();
  }

  // ---- columns ----

  void emit_columns() {
    PENSTOCK_INVARIANT(inner_ + 1 == kernel_.sizes.size(), "columns are one loop");
    const std::vector<char> varies = varies_in_row(kernel_);
    const std::int64_t columns = kernel_.sizes.back(), rows = kernel_.product(0, inner_);
    std::vector<std::size_t> sums;
    for (std::size_t i = 0; i < kernel_.instructions.size(); ++i)
      if (is_reduction(kernel_.instructions[i].op)) sums.push_back(i);
    open("for (i64 u = begin; u < end; ++u)");
    line(fmt::format("const i64 c = u * {0}ll, n = {1}ll - c < {0}ll ? {1}ll - c : {0}ll;", kColumnBlock,
                     columns));
    for (const std::size_t i : sums)
      line(fmt::format("{} t{}[{}] = {{}};", sum_type(kernel_.instructions[i].type), i, kColumnBlock));
    open(fmt::format("for (i64 f = 0; f < {}ll; f += {}ll)", rows, kRowsOfOneSum));
    line(fmt::format("const i64 l = f + {0}ll < {1}ll ? f + {0}ll : {1}ll;", kRowsOfOneSum, rows));
    for (const std::size_t i : sums)
      line(fmt::format("alignas(64) {} s{}[{}] = {{}};", memory_type(kernel_.instructions[i].type), i,
                       kColumnBlock));
    open("for (i64 r = f; r < l; ++r)");
    addresses(0, inner_, "r", "p", "q", "c");
    for (std::size_t i = 0; i < varies.size(); ++i)
      if (!varies[i] && !is_reduction(kernel_.instructions[i].op)) value(i, computed(i, "q", ""));
    line("#pragma omp simd");
    open("for (i64 j = 0; j < n; ++j)");
    for (std::size_t i = 0; i < varies.size(); ++i)
      if (varies[i]) value(i, computed(i, "q", "j"));
    for (const std::size_t i : sums)
      line(fmt::format("s{}[j] += {};", i, operand_text(kernel_.instructions[i], 0)));
    close();
    close();
    for (const std::size_t i : sums) line(fmt::format("for (i64 j = 0; j < n; ++j) t{0}[j] += s{0}[j];", i));
    close();
    open("for (i64 j = 0; j < n; ++j)");
    for (const std::size_t i : sums) {
      value(i, fmt::format("({})t{}[j]", value_type(kernel_.instructions[i].type), i));
      for (const LoopStore& each : kernel_.stores)
        if (static_cast<std::size_t>(each.value) == i)
          line(fmt::format("p{}[{}] = {};", each.buffer,
                           index_text("(c + j)", kernel_.buffers[each.buffer].strides.back()), stored(each)));
    }
    close();
    close();
  }

  const NamedKernel& named_;
  const LoopKernel& kernel_;
  const std::size_t inner_;
  std::size_t depth_ = 0;
  std::string text_;
};

}  // namespace

std::string emit_function(const NamedKernel& kernel) { return FunctionEmitter(kernel).emit(); }

std::string emit_cpp(const std::vector<NamedKernel>& kernels) {
  std::string source(kPrelude);
  for (const NamedKernel& kernel : kernels) source += "\n" + emit_function(kernel);
  return source;
}

bool may_share_memory(const LoopKernel& kernel, std::size_t read, std::size_t written) {
  return may_share_memory(kernel, read, written, /*with_kept=*/true);
}

}  // namespace penstock::graph
