#include "penstock/graph/codegen/emit_cuda.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string_view>

#include "penstock/base/describe.h"
#include "penstock/graph/codegen/loop_text.h"
#include "penstock/graph/codegen/row_passes.h"

namespace penstock::graph {
namespace {

// What all kernels use. The macros are GCC's names in the text of instructions (loop_text.h).
constexpr std::string_view kCudaPrelude =
    R"cuda(typedef long long i64;
           typedef int i32;
           typedef short i16;
           typedef signed char i8;
           typedef unsigned int u32;
           typedef unsigned short u16;
           typedef unsigned char u8;
#define INLINE static __device__ __forceinline__
#define __builtin_fabs fabs
#define __builtin_fabsf fabsf
#define __builtin_sqrt sqrt
#define __builtin_sqrtf sqrtf
#define __builtin_inff() __int_as_float(0x7f800000)
#define __builtin_inf() __longlong_as_double(0x7ff0000000000000ll)
#define __builtin_nanf(text) __int_as_float(0x7fc00000)
#define __builtin_nan(text) __longlong_as_double(0x7ff8000000000000ll)
           INLINE float from_bfloat16(u16 h) { return __uint_as_float((u32)h << 16); }
           INLINE u16 to_bfloat16(float x) {
             const u32 b = __float_as_uint(x);
             return (u16)(x != x ? 0x7fc0u : (b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
           }
           INLINE float from_half(u16 h) {
             float x;
             asm("{ cvt.f32.f16 %0, %1; }" : "=f"(x) : "h"(h));
             return x;
           }
           INLINE u16 to_half(float x) {
             u16 h;
             asm("{ cvt.rn.f16.f32 %0, %1; }" : "=h"(h) : "f"(x));
             return h;
           }
           INLINE float exp_of(float x) { return expf(x); }
           INLINE float log_of(float x) { return logf(x); }
           INLINE float tanh_of(float x) { return tanhf(x); }
           INLINE float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }
           INLINE float erf_of(float x) { return erff(x); }
           template <class T, int n> struct alignas(sizeof(T) * n) Vector {
             T item[n];
           };
           template <class T> INLINE T exchanged(T x, int lanes) {
             if constexpr (sizeof(T) < 4)
               return (T)__shfl_xor_sync(0xffffffffu, (int)x, lanes);
             else
               return __shfl_xor_sync(0xffffffffu, x, lanes);
           }
           struct SumOf {
             template <class T> static __device__ __forceinline__ T of(T a, T b) { return (T)(a + b); }
           };
           struct MaximumOf {
             template <class T> static __device__ __forceinline__ T of(T a, T b) {
               return (a > b) | (a != a) ? a : b;
             }
           };
           struct MinimumOf {
             template <class T> static __device__ __forceinline__ T of(T a, T b) {
               return (a < b) | (a != a) ? a : b;
             }
           };
           // The same for all threads of a block. Every thread of the block must come here.
           template <class Of, int threads, class T> INLINE T reduced(T x) {
#pragma unroll
             for (int lanes = 16; lanes > 0; lanes >>= 1) x = Of::of(x, exchanged(x, lanes));
             if constexpr (threads > 32) {
               __shared__ T of_warps[threads / 32];
               __syncthreads();
               if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
               __syncthreads();
               x = of_warps[threadIdx.x % (threads / 32)];
#pragma unroll
               for (int lanes = threads / 64; lanes > 0; lanes >>= 1) x = Of::of(x, exchanged(x, lanes));
             }
             return x;
           }
)cuda";

constexpr unsigned kElementThreads = 256;
constexpr unsigned kMostRowThreads = 512;
constexpr std::size_t kMostIterations = 4;            // of a row whose loads are kept
constexpr std::size_t kMostResidentBytes = 256;       // of a thread
constexpr unsigned kColumnLanes = 32, kRowLanes = 8;  // threads of a block for Columns
constexpr std::int64_t kRowsOfASplit = 64;            // at least

// Whether neighbours in the innermost loop are a vector in memory.
bool is_vector(const LoopKernel& kernel, const LoopBuffer& buffer, unsigned vector) {
  if (kernel.sizes.empty() || buffer.strides.back() != 1) return false;
  for (std::size_t d = 0; d + 1 < buffer.strides.size(); ++d)
    if (kernel.sizes[d] > 1 && buffer.strides[d] % vector != 0) return false;
  return true;
}

// How many neighbours are 16 bytes of the widest buffer, if the innermost loop can be divided so.
unsigned vector_of(const LoopKernel& kernel) {
  std::size_t widest = 0;
  for (const LoopBuffer& buffer : kernel.buffers)
    if (is_vector(kernel, buffer, 1)) widest = std::max(widest, bytes_of(buffer.type));
  if (widest == 0) return 1;
  unsigned vector = static_cast<unsigned>(std::min<std::size_t>(8, 16 / widest));
  const bool has_tail = kernel.form == LoopForm::Elements && kernel.sizes.size() == 1;
  while (vector > 1 && !has_tail && kernel.sizes.back() % vector != 0) vector /= 2;
  return vector;
}

// Whether offsets in elements fit in 32 bits.
bool is_small(const LoopKernel& kernel) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 2;
  if (kernel.elements() > kMost) return false;
  return std::all_of(kernel.buffers.begin(), kernel.buffers.end(), [&](const LoopBuffer& buffer) {
    std::int64_t last = 0;
    for (std::size_t d = 0; d < kernel.sizes.size(); ++d)
      last += std::max<std::int64_t>(0, kernel.sizes[d] - 1) * buffer.strides[d];
    return last <= kMost;
  });
}

unsigned power_of_two_from(std::int64_t least, unsigned from, unsigned most) {
  unsigned power = from;
  while (power < most && power < least) power *= 2;
  return power;
}

class CudaEmitter {
 public:
  explicit CudaEmitter(const NamedKernel& named)
      : named_(named),
        kernel_(named.kernel),
        plan_(cuda_plan(kernel_)),
        inner_(kernel_.first_inner_dim()),
        index_(is_small(kernel_) ? "i32" : "i64") {}

  std::string emit() {
    if (!named_.comment.empty()) line("// " + named_.comment);
    switch (kernel_.form) {
      case LoopForm::Elements:
        emit_elements();
        break;
      case LoopForm::Rows:
        emit_rows();
        break;
      case LoopForm::Columns:
        emit_columns();
        break;
    }
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

  std::string number(std::int64_t value) const {
    return index_ == "i32" ? std::to_string(value) : std::to_string(value) + "ll";
  }
  std::string pointer_type(std::size_t i) const {
    const LoopBuffer& buffer = kernel_.buffers[i];
    return fmt::format("{}{}*", buffer.written ? "" : "const ", memory_type(buffer.type));
  }
  std::string parameters() const {
    std::string text;
    for (std::size_t i = 0; i < kernel_.buffers.size(); ++i)
      text += fmt::format("{}{} p{}", i > 0 ? ", " : "", pointer_type(i), i);
    return text;
  }
  std::string arguments() const {
    std::string text;
    for (std::size_t i = 0; i < kernel_.buffers.size(); ++i)
      text += fmt::format("{}p{}", i > 0 ? ", " : "", i);
    return text;
  }

  // Places in loops [first, end), counted by `variable`, as offsets NAME0, NAME1, ... of the buffers that
  // move there, from those of `base`.
  void offsets(std::size_t first, std::size_t end, const std::string& variable, const std::string& name,
               const std::string& base) {
    std::vector<std::string> index(kernel_.sizes.size());
    std::string rest = variable;
    for (std::size_t d = end; d-- > first;) {
      index[d] = fmt::format("{}i{}", name, d);
      if (d == first) {
        line(fmt::format("const {} {} = {};", index_, index[d], rest));
      } else {
        line(fmt::format("const {} {} = {} % {};", index_, index[d], rest, number(kernel_.sizes[d])));
        const std::string next = fmt::format("{}r{}", name, d);
        line(fmt::format("const {} {} = {} / {};", index_, next, rest, number(kernel_.sizes[d])));
        rest = next;
      }
    }
    for (std::size_t i = 0; i < kernel_.buffers.size(); ++i) {
      std::string offset = base.empty() ? "0" : fmt::format("{}{}", base, i);
      for (std::size_t d = first; d < end; ++d)
        if (const std::int64_t stride = kernel_.buffers[i].strides[d]; stride != 0)
          offset += fmt::format(" + {} * {}", index[d], number(stride));
      line(fmt::format("const {} {}{} = {};", index_, name, i, offset));
    }
  }

  void value(std::size_t i, const std::string& text) {
    line(fmt::format("const {} v{} = {};", value_type(kernel_.instructions[i].type), i, text));
  }
  // An instruction that is the same for all elements of a vector, or of a row; loads are at `offset`.
  void uniform(std::size_t i, const std::string& offset) {
    const LoopInstruction& instruction = kernel_.instructions[i];
    if (instruction.op == LoopOp::Load)
      value(i, loaded_text(kernel_.buffers[instruction.buffer].type,
                           fmt::format("p{0}[{1}{0}]", instruction.buffer, offset)));
    else
      value(i, instruction_text(kernel_, i));
  }

  std::string vector_type(std::size_t buffer) const {
    return fmt::format("Vector<{}, V>", memory_type(kernel_.buffers[buffer].type));
  }
  bool loads_vector(std::size_t buffer) const {
    return is_vector(kernel_, kernel_.buffers[buffer], plan_.vector);
  }

  // Loads of whole vectors at the offsets q0, q1, ...
  void load_vectors(const std::vector<std::size_t>& instructions) {
    for (const std::size_t i : instructions) {
      const LoopInstruction& instruction = kernel_.instructions[i];
      if (instruction.op == LoopOp::Load && loads_vector(instruction.buffer))
        line(fmt::format("const {0} l{1} = *(const {0}*)(p{2} + q{2});", vector_type(instruction.buffer), i,
                         instruction.buffer));
    }
  }
  void load_items(const std::vector<std::size_t>& instructions) {
    for (const std::size_t i : instructions) {
      const LoopInstruction& instruction = kernel_.instructions[i];
      if (instruction.op != LoopOp::Load || loads_vector(instruction.buffer)) continue;
      line(fmt::format("{} l{};", vector_type(instruction.buffer), i));
      line("#pragma unroll");
      line(fmt::format("for (int l = 0; l < V; ++l) l{0}.item[l] = p{1}[q{1} + l * {2}];", i,
                       instruction.buffer, number(kernel_.buffers[instruction.buffer].strides.back())));
    }
  }

  void declare_stores(const std::vector<LoopStore>& stores) {
    for (const LoopStore& store : stores)
      line(fmt::format("{} o{};", vector_type(store.buffer), store.buffer));
  }
  // The instructions for each element of a vector, from loads l<i>. `place`: of the first in its row.
  void compute(const std::vector<std::size_t>& instructions, const std::vector<LoopStore>& stores,
               const std::vector<std::size_t>& reductions, const std::string& place,
               const std::string& of_iteration = {}) {
    line("#pragma unroll");
    open("for (int l = 0; l < V; ++l)");
    for (const std::size_t i : instructions) {
      const LoopInstruction& instruction = kernel_.instructions[i];
      if (instruction.op == LoopOp::Load)
        value(i, loaded_text(kernel_.buffers[instruction.buffer].type,
                             fmt::format("l{}{}.item[l]", i, of_iteration)));
      else if (instruction.op == LoopOp::Position)
        value(i, fmt::format("(i64)({} + l)", place));
      else
        value(i, instruction_text(kernel_, i));
    }
    for (const std::size_t i : reductions)
      line(fmt::format("a{0} = {1}::of(a{0}, {2});", i, reduction_of(i),
                       operand_text(kernel_.instructions[i], 0)));
    for (const LoopStore& store : stores)
      line(fmt::format("o{}.item[l] = {};", store.buffer,
                       stored_text(kernel_.buffers[store.buffer].type, fmt::format("v{}", store.value))));
    close();
  }
  void store_vectors(const std::vector<LoopStore>& stores) {
    for (const LoopStore& store : stores) {
      const std::size_t i = store.buffer;
      if (loads_vector(i)) {
        line(fmt::format("*({1}*)(p{0} + q{0}) = o{0};", i, vector_type(i)));
      } else {
        line("#pragma unroll");
        line(fmt::format("for (int l = 0; l < V; ++l) p{0}[q{0} + l * {1}] = o{0}.item[l];", i,
                         number(kernel_.buffers[i].strides.back())));
      }
    }
  }

  std::string_view reduction_of(std::size_t i) const {
    switch (kernel_.instructions[i].op) {
      case LoopOp::RowMaximum:
        return "MaximumOf";
      case LoopOp::RowMinimum:
        return "MinimumOf";
      default:
        return "SumOf";
    }
  }
  // The number that a reduction begins with.
  std::string start_of(std::size_t i) const {
    const LoopInstruction& reduction = kernel_.instructions[i];
    if (reduction.op != LoopOp::RowMaximum && reduction.op != LoopOp::RowMinimum) return "0";
    const bool maximum = reduction.op == LoopOp::RowMaximum;
    if (is_float(reduction.type))
      return fmt::format("{}__builtin_inf{}()", maximum ? "-" : "",
                         reduction.type == ElementType::Double ? "" : "f");
    const auto bits = static_cast<unsigned>(8 * bytes_of(reduction.type));
    const bool is_unsigned = reduction.type == ElementType::UInt8;
    const std::string largest = is_unsigned ? "255" : fmt::format("(i64)(~0ull >> {})", 65 - bits);
    const std::string least = is_unsigned ? "0" : fmt::format("(-{} - 1)", largest);
    return maximum ? least : largest;
  }

  std::vector<std::size_t> varying(const std::vector<char>& varies) const {
    std::vector<std::size_t> all;
    for (std::size_t i = 0; i < varies.size(); ++i)
      if (varies[i] && !is_reduction(kernel_.instructions[i].op)) all.push_back(i);
    return all;
  }

  // ---- elements ----

  void emit_elements() {
    const std::vector<char> varies = varies_in_row(kernel_);
    const std::vector<std::size_t> inside = varying(varies);
    open(
        fmt::format("template <int V> INLINE void {}_at(const {} e, {})", named_.name, index_, parameters()));
    offsets(0, kernel_.sizes.size(), "e", "q", "");
    load_vectors(inside);
    load_items(inside);
    for (std::size_t i = 0; i < varies.size(); ++i)
      if (!varies[i]) uniform(i, "q");
    declare_stores(kernel_.stores);
    compute(inside, kernel_.stores, {}, "0");
    store_vectors(kernel_.stores);
    close();
    const std::string elements = number(kernel_.elements());
    open(fmt::format("extern \"C\" __global__ void __launch_bounds__({}) {}({}, int aligned)", plan_.threads,
                     named_.name, parameters()));
    line(fmt::format("{0} e = (({0})blockIdx.x * {1} + ({0})threadIdx.x) * {2};", index_, plan_.threads,
                     plan_.vector));
    if (plan_.vector > 1) {
      open(fmt::format("if (aligned && e + {} <= {})", plan_.vector, elements));
      line(fmt::format("{}_at<{}>(e, {});", named_.name, plan_.vector, arguments()));
      line("return;");
      close();
    }
    line(fmt::format("for (int l = 0; l < {0} && e < {1}; ++l, ++e) {2}_at<1>(e, {3});", plan_.vector,
                     elements, named_.name, arguments()));
    close();
  }

  // ---- rows ----

  void emit_rows() {
    const RowPasses passes(kernel_);
    const std::int64_t row = kernel_.product(inner_, kernel_.sizes.size());
    open(fmt::format("template <int V> INLINE void {}_row({})", named_.name, parameters()));
    line(fmt::format("const {0} u = ({0})blockIdx.x;", index_));
    offsets(0, inner_, "u", "b", "");
    const std::string iterations = fmt::format("({0} + {1} * V - 1) / ({1} * V)", row, plan_.threads);
    line(fmt::format("constexpr int R = {};", iterations));
    const std::vector<std::size_t> inside = varying(passes.varies);
    if (plan_.resident) {
      for (const std::size_t i : inside)
        if (const LoopInstruction& each = kernel_.instructions[i]; each.op == LoopOp::Load)
          line(fmt::format("{} l{}[R];", vector_type(each.buffer), i));
      open_iterations(row);
      for (const std::size_t i : inside)
        if (const LoopInstruction& each = kernel_.instructions[i]; each.op == LoopOp::Load) {
          if (loads_vector(each.buffer)) {
            line(fmt::format("l{0}[r] = *(const {1}*)(p{2} + q{2});", i, vector_type(each.buffer),
                             each.buffer));
          } else {
            line("#pragma unroll");
            line(fmt::format("for (int l = 0; l < V; ++l) l{0}[r].item[l] = p{1}[q{1} + l * {2}];", i,
                             each.buffer, number(kernel_.buffers[each.buffer].strides.back())));
          }
        }
      close();
      close();
    }
    for (std::size_t pass = 0; pass < passes.passes; ++pass) {
      for (std::size_t i = 0; i < passes.depth.size(); ++i)
        if (passes.depth[i] == pass && !passes.varies[i] && !is_reduction(kernel_.instructions[i].op))
          uniform(i, "b");
      if (passes.has_loop(pass)) emit_pass(passes, pass, row);
    }
    if (!passes.once.empty()) {
      open("if (threadIdx.x == 0)");
      for (const LoopStore& store : passes.once)
        line(fmt::format("p{0}[b{0}] = {1};", store.buffer,
                         stored_text(kernel_.buffers[store.buffer].type, fmt::format("v{}", store.value))));
      close();
    }
    close();
    open(fmt::format("extern \"C\" __global__ void __launch_bounds__({}) {}({}, int aligned)", plan_.threads,
                     named_.name, parameters()));
    if (plan_.vector > 1)
      line(fmt::format("if (aligned) return {}_row<{}>({});", named_.name, plan_.vector, arguments()));
    line(fmt::format("{}_row<1>({});", named_.name, arguments()));
    close();
  }

  // The loop over the elements of a row that this thread computes, and the condition that there is one.
  void open_iterations(std::int64_t row) {
    line(plan_.resident ? "#pragma unroll" : "#pragma unroll 1");
    open("for (int r = 0; r < R; ++r)");
    line(fmt::format("const {0} c = (({0})r * {1} + ({0})threadIdx.x) * V;", index_, plan_.threads));
    open(fmt::format("if (c < {})", number(row)));
    offsets(inner_, kernel_.sizes.size(), "c", "q", "b");
  }

  void emit_pass(const RowPasses& passes, std::size_t pass, std::int64_t row) {
    const std::vector<std::size_t>& reductions = passes.reductions[pass];
    const std::vector<std::size_t> here = passes.computed_in(pass, false);
    for (const std::size_t i : reductions)
      line(fmt::format("{} a{} = {};", value_type(kernel_.instructions[i].type), i, start_of(i)));
    open_iterations(row);
    if (!plan_.resident) {
      load_vectors(here);
      load_items(here);
    }
    declare_stores(passes.stores[pass]);
    compute(here, passes.stores[pass], reductions, "c", plan_.resident ? "[r]" : "");
    store_vectors(passes.stores[pass]);
    close();
    close();
    for (const std::size_t i : reductions)
      value(i, fmt::format("reduced<{}, {}>(a{})", reduction_of(i), plan_.threads, i));
  }

  // ---- columns ----

  void emit_columns() {
    PENSTOCK_INVARIANT(inner_ + 1 == kernel_.sizes.size(), "columns are one loop");
    const std::vector<char> varies = varies_in_row(kernel_);
    const std::vector<std::size_t> inside = varying(varies);
    const std::int64_t columns = kernel_.sizes.back();
    const unsigned tile = kColumnLanes * plan_.vector;
    const std::int64_t tiles = plan_.blocks;
    open(fmt::format("template <int V> INLINE void {}_tile({}, i64 rows_of_split, char* partial)",
                     named_.name, parameters()));
    line(fmt::format("const int lane = threadIdx.x % {}, slice = threadIdx.x / {};", kColumnLanes,
                     kColumnLanes));
    line(fmt::format("const {0} split = ({0})(blockIdx.x / {1}), splits = ({0})(gridDim.x / {1});", index_,
                     number(tiles)));
    // A vector of one has as many columns for each thread, one after the other.
    line(fmt::format("for (int part = 0; part < {}; part += V) {{", plan_.vector));
    ++depth_;
    line(fmt::format("const {0} c = ({0})(blockIdx.x % {1}) * {2} + part * {3} + lane * V;", index_,
                     number(tiles), tile, kColumnLanes));
    for (const std::size_t i : plan_.sums)
      line(fmt::format("{} a{}[V] = {{}};", value_type(kernel_.instructions[i].type), i));
    open(fmt::format("if (c < {})", number(columns)));
    line(fmt::format("const {0} first = split * ({0})rows_of_split;", index_));
    line(fmt::format("const {0} last = first + ({0})rows_of_split < {1} ? first + ({0})rows_of_split : {1};",
                     index_, number(plan_.rows)));
    open(fmt::format("for ({0} r = first + slice; r < last; r += {1})", index_, kRowLanes));
    offsets(0, inner_, "r", "b", "");
    offsets(inner_, kernel_.sizes.size(), "c", "q", "b");
    load_vectors(inside);
    load_items(inside);
    for (std::size_t i = 0; i < varies.size(); ++i)
      if (!varies[i] && !is_reduction(kernel_.instructions[i].op)) uniform(i, "b");
    line("#pragma unroll");
    open("for (int l = 0; l < V; ++l)");
    for (const std::size_t i : inside) {
      const LoopInstruction& instruction = kernel_.instructions[i];
      value(i, instruction.op == LoopOp::Load
                   ? loaded_text(kernel_.buffers[instruction.buffer].type, fmt::format("l{}.item[l]", i))
                   : instruction_text(kernel_, i));
    }
    for (const std::size_t i : plan_.sums)
      line(fmt::format("a{0}[l] = SumOf::of(a{0}[l], {1});", i, operand_text(kernel_.instructions[i], 0)));
    close();
    close();
    close();
    for (std::size_t s = 0; s < plan_.sums.size(); ++s) {
      const std::size_t i = plan_.sums[s];
      const std::string_view type = value_type(kernel_.instructions[i].type);
      line("{");
      ++depth_;
      line(fmt::format("__shared__ {} of_slices[{}][{} * V + 1];", type, kRowLanes, kColumnLanes));
      line("__syncthreads();");
      line("#pragma unroll");
      line(fmt::format("for (int l = 0; l < V; ++l) of_slices[slice][lane * V + l] = a{}[l];", i));
      line("__syncthreads();");
      // Neighbouring threads add up neighbouring columns.
      open(fmt::format("for (int k = threadIdx.x; k < {} * V; k += {})", kColumnLanes, plan_.threads));
      line(fmt::format("const {0} column = ({0})(blockIdx.x % {1}) * {2} + part * {3} + k;", index_,
                       number(tiles), tile, kColumnLanes));
      open(fmt::format("if (column < {})", number(columns)));
      line(fmt::format("{} v{} = 0;", type, i));
      line("#pragma unroll");
      line(fmt::format("for (int y = 0; y < {0}; ++y) v{1} = SumOf::of(v{1}, of_slices[y][k]);", kRowLanes,
                       i));
      open("if (splits > 1)");
      line(fmt::format(
          "(({0}*)(partial + (i64){1} * splits * {2}ll * 8))[(i64)split * {2}ll + column] = v{3};", type, s,
          columns, i));
      --depth_;
      line("} else {");
      ++depth_;
      store_sums(i);
      close();
      close();
      close();
      close();
    }
    close();
    close();
    open(
        fmt::format("extern \"C\" __global__ void __launch_bounds__({}) {}({}, int aligned, i64 "
                    "rows_of_split, char* partial)",
                    plan_.threads, named_.name, parameters()));
    if (plan_.vector > 1)
      line(fmt::format("if (aligned) return {}_tile<{}>({}, rows_of_split, partial);", named_.name,
                       plan_.vector, arguments()));
    line(fmt::format("{}_tile<1>({}, rows_of_split, partial);", named_.name, arguments()));
    close();

    std::string written;
    for (std::size_t i = 0; i < kernel_.buffers.size(); ++i)
      if (kernel_.buffers[i].written) written += fmt::format(", {} p{}", pointer_type(i), i);
    open(fmt::format(
        "extern \"C\" __global__ void __launch_bounds__({}) {}_end(const char* partial, int splits{})",
        kElementThreads, named_.name, written));
    line(
        fmt::format("const {0} column = ({0})blockIdx.x * {1} + ({0})threadIdx.x;", index_, kElementThreads));
    line(fmt::format("if (column >= {}) return;", number(columns)));
    for (std::size_t s = 0; s < plan_.sums.size(); ++s) {
      const std::size_t i = plan_.sums[s];
      const std::string_view type = value_type(kernel_.instructions[i].type);
      line(fmt::format("{} t{} = 0;", is_float(kernel_.instructions[i].type) ? "double" : type, i));
      line(fmt::format(
          "for (int s = 0; s < splits; ++s) t{0} += ((const {1}*)(partial + (i64){2} * splits * {3}ll * "
          "8))[(i64)s * {3}ll + column];",
          i, type, s, columns));
      line(fmt::format("const {0} v{1} = ({0})t{1};", type, i));
      store_sums(i);
    }
    close();
  }
  // What is stored of a sum, at `column`.
  void store_sums(std::size_t sum) {
    for (const LoopStore& store : kernel_.stores)
      if (static_cast<std::size_t>(store.value) == sum)
        line(fmt::format("p{0}[{1}] = {2};", store.buffer,
                         index_text("column", kernel_.buffers[store.buffer].strides.back()),
                         stored_text(kernel_.buffers[store.buffer].type, fmt::format("v{}", sum))));
  }

  const NamedKernel& named_;
  const LoopKernel& kernel_;
  const CudaPlan plan_;
  const std::size_t inner_;
  const std::string_view index_;  // the type of offsets
  std::size_t depth_ = 0;
  std::string text_;
};

}  // namespace

CudaPlan cuda_plan(const LoopKernel& kernel) {
  CudaPlan plan;
  plan.vector = vector_of(kernel);
  for (const LoopBuffer& buffer : kernel.buffers)
    if (is_vector(kernel, buffer, plan.vector))
      plan.alignment = std::max(plan.alignment, plan.vector * bytes_of(buffer.type));
  const std::size_t inner = kernel.first_inner_dim();
  switch (kernel.form) {
    case LoopForm::Elements: {
      plan.threads = kElementThreads;
      const std::int64_t of_block = static_cast<std::int64_t>(plan.threads) * plan.vector;
      plan.blocks = (kernel.elements() + of_block - 1) / of_block;
      break;
    }
    case LoopForm::Rows: {
      const std::int64_t row = kernel.product(inner, kernel.sizes.size());
      const std::int64_t vectors = (row + plan.vector - 1) / plan.vector;
      plan.threads = power_of_two_from((vectors + 1) / 2, 32, kMostRowThreads);
      plan.blocks = kernel.product(0, inner);
      plan.iterations = static_cast<std::size_t>((vectors + plan.threads - 1) / plan.threads);
      // Rows of unaligned tensors are read one element at a time, by the same threads.
      const std::size_t most = plan.iterations * plan.vector;
      const std::vector<char> varies = varies_in_row(kernel);
      std::size_t bytes = 0;
      for (std::size_t i = 0; i < varies.size(); ++i)
        if (varies[i] && kernel.instructions[i].op == LoopOp::Load)
          bytes += most * bytes_of(kernel.buffers[kernel.instructions[i].buffer].type);
      plan.resident = plan.iterations <= kMostIterations && bytes <= kMostResidentBytes;
      break;
    }
    case LoopForm::Columns: {
      plan.threads = kColumnLanes * kRowLanes;
      plan.rows = kernel.product(0, inner);
      const std::int64_t tile = static_cast<std::int64_t>(kColumnLanes) * plan.vector;
      plan.blocks = (kernel.sizes.back() + tile - 1) / tile;
      for (std::size_t i = 0; i < kernel.instructions.size(); ++i)
        if (is_reduction(kernel.instructions[i].op)) plan.sums.push_back(i);
      break;
    }
  }
  return plan;
}

std::int64_t CudaPlan::splits(int multiprocessors) const {
  const std::int64_t most = std::max<std::int64_t>(1, rows / kRowsOfASplit);
  const std::int64_t wanted =
      6 * static_cast<std::int64_t>(multiprocessors) / std::max<std::int64_t>(1, blocks);
  return std::clamp<std::int64_t>(wanted, 1, most);
}

std::size_t CudaPlan::workspace_bytes(std::int64_t splits, std::int64_t columns) const {
  return splits > 1 ? sums.size() * static_cast<std::size_t>(splits * columns) * 8 : 0;
}

std::string emit_cuda_function(const NamedKernel& kernel) { return CudaEmitter(kernel).emit(); }

std::string emit_cuda(const std::vector<NamedKernel>& kernels) {
  std::string source(kCudaPrelude);
  for (const NamedKernel& kernel : kernels) source += "\n" + emit_cuda_function(kernel);
  return source;
}

bool may_share_memory_on_cuda(const LoopKernel& kernel, std::size_t read, std::size_t written) {
  // A thread reads and writes the same elements in each pass, and keeps none.
  return may_share_memory(kernel, read, written, /*with_kept=*/false);
}

}  // namespace penstock::graph
