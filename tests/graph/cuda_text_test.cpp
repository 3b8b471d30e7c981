// The CUDA text of loop kernels, run on the CPU: each thread of a block is a context of its own that runs
// until the next barrier. What a GPU's compiler makes of it is tested where there is one (fused_groups_test).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/graph/codegen/emit_cuda.h"
#include "penstock/graph/codegen/host_compiler.h"
#include "tests/graph/random_kernel.h"

namespace penstock::graph {
namespace cuda_text_test {

using namespace random_kernels;

// What CUDA has and C++ has not.
constexpr std::string_view kGrid = R"cpp(
#include <ucontext.h>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>
  struct Place {
    unsigned x;
  };
  static Place threadIdx, blockIdx, gridDim;
  static const unsigned kStack = 1 << 16, kMostThreads = 512;
  static ucontext_t scheduler, contexts[kMostThreads];
  static char* stacks = (char*)malloc((size_t)kStack * kMostThreads);
  static long long exchange[kMostThreads];
  static bool ended[kMostThreads];
  static void (*entry)(void* const*);
  static void* const* entry_arguments;
  static void barrier() {
    const unsigned own = threadIdx.x;
    swapcontext(&contexts[own], &scheduler);
  }
  static void thread_main() {
    entry(entry_arguments);
    ended[threadIdx.x] = true;
  }
  // Returns false if some threads of a block come to a barrier and others end.
  static bool run_grid(void (*function)(void* const*), void* const* arguments, unsigned blocks,
                       unsigned threads) {
    entry = function;
    entry_arguments = arguments;
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
      for (unsigned t = 0; t < threads; ++t) {
        getcontext(&contexts[t]);
        contexts[t].uc_stack.ss_sp = stacks + (size_t)kStack * t;
        contexts[t].uc_stack.ss_size = kStack;
        contexts[t].uc_link = &scheduler;
        makecontext(&contexts[t], thread_main, 0);
        ended[t] = false;
      }
      for (bool going = true; going;) {
        unsigned over = 0;
        for (unsigned t = 0; t < threads; ++t) {
          threadIdx.x = t;
          if (!ended[t]) swapcontext(&scheduler, &contexts[t]);
          over += ended[t];
        }
        going = over < threads;
        if (going && over > 0) return false;
      }
    }
    return true;
  }
  template <class T>
  T __shfl_xor_sync(unsigned, T x, int lanes) {
    memcpy(&exchange[threadIdx.x], &x, sizeof x);
    barrier();
    T other;
    memcpy(&other, &exchange[threadIdx.x ^ (unsigned)lanes], sizeof other);
    barrier();
    return other;
  }
#define __device__
#define __global__
#define __forceinline__
#define __launch_bounds__(threads)
#define __shared__ static
#define __syncthreads() barrier()
  static float __int_as_float(int x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
  }
  static float __uint_as_float(unsigned x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
  }
  static unsigned __float_as_uint(float x) {
    unsigned y;
    memcpy(&y, &x, 4);
    return y;
  }
  static double __longlong_as_double(long long x) {
    double y;
    memcpy(&y, &x, 8);
    return y;
  }
  static float half_to_float(unsigned short h) {
    _Float16 x;
    memcpy(&x, &h, 2);
    return (float)x;
  }
  static unsigned short float_to_half(float x) {
    _Float16 y = (_Float16)x;
    unsigned short h;
    memcpy(&h, &y, 2);
    return h;
  }
  struct Any {
    void* p;
    template <class T>
    operator T*() const {
      return (T*)p;
    }
  };
)cpp";

void replace(std::string& text, std::string_view what, std::string_view by) {
  const auto at = text.find(what);
  ASSERT_NE(at, std::string::npos) << what;
  text.replace(at, what.size(), by);
}

std::string buffers_of(const LoopKernel& kernel, bool written_alone) {
  std::string text;
  for (std::size_t i = 0; i < kernel.buffers.size(); ++i)
    if (!written_alone || kernel.buffers[i].written)
      text += (text.empty() ? "Any{b[" : ", Any{b[") + std::to_string(i) + "]}";
  return text;
}

// Callers by the names run_k0 and run_k0_end: buffers, then what follows them in the kernel.
std::string caller_of(const NamedKernel& named) {
  const std::size_t n = named.kernel.buffers.size();
  const auto extra = [&](std::size_t i) { return "b[" + std::to_string(n + i) + "]"; };
  const bool columns = named.kernel.form == LoopForm::Columns;
  std::string text =
      "extern \"C\" long run_" + named.name +
      "(void* const* b, long long blocks, long long threads) { return run_grid([](void* const* b) { " +
      named.name + "(" + buffers_of(named.kernel, false) + ", *(int*)" + extra(0);
  if (columns) text += ", *(long long*)" + extra(1) + ", (char*)" + extra(2);
  text += "); }, b, blocks, threads); }\n";
  if (columns)
    text +=
        "extern \"C\" long run_" + named.name +
        "_end(void* const* b, long long blocks, long long threads) { return run_grid([](void* const* b) { " +
        named.name + "_end((const char*)" + extra(2) + ", *(int*)" + extra(3) + ", " +
        buffers_of(named.kernel, true) + "); }, b, blocks, threads); }\n";
  return text;
}

using Runner = long (*)(void* const* buffers, long long blocks, long long threads);

// `splits`: of the rows, for Columns.
void run(const LoadedCode& library, const NamedKernel& named, std::vector<Memory>& memory, int aligned,
         std::int64_t splits) {
  const CudaPlan plan = cuda_plan(named.kernel);
  std::vector<void*> buffers;
  for (Memory& each : memory) {
    buffers.push_back(each.data());
    if (reinterpret_cast<std::uintptr_t>(each.data()) % plan.alignment != 0) aligned = 0;
  }
  const auto function = [&](const std::string& name) {
    return reinterpret_cast<Runner>(reinterpret_cast<void*>(library.function("run_" + name)));
  };
  long long rows_of_split = 0;
  std::vector<std::int64_t> partial;
  int count = 1;
  const bool columns = named.kernel.form == LoopForm::Columns;
  if (columns) {
    rows_of_split = (plan.rows + splits - 1) / splits;
    count = static_cast<int>((plan.rows + rows_of_split - 1) / rows_of_split);
    partial.resize(plan.workspace_bytes(count, named.kernel.sizes.back()) / 8);
  }
  buffers.insert(buffers.end(), {&aligned, &rows_of_split, partial.data(), &count});
  ASSERT_TRUE(function(named.name)(buffers.data(), plan.blocks * count, plan.threads))
      << "a barrier in a branch";
  if (count > 1) {
    ASSERT_TRUE(function(named.name + "_end")(buffers.data(), (named.kernel.sizes.back() + 255) / 256, 256));
  }
}

TEST(CudaText, OnAGridOfThreadsComputesWhatTheInterpreterDoes) {
  HostCompiler compiler = host_compiler();
  ASSERT_TRUE(compiler.works()) << compiler.problem;
  compiler.flags = {"-x",      "c++", "-std=gnu++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off",
                    "-fwrapv", "-w"};
  const unsigned all = random_count() / 2;
  std::vector<NamedKernel> kernels;
  for (unsigned seed = 0; seed < all; ++seed)
    kernels.push_back({"k" + std::to_string(seed), RandomKernel(seed).make()});
  std::string source = emit_cuda(kernels);
  replace(source, R"(asm("{ cvt.f32.f16 %0, %1; }" : "=f"(x) : "h"(h));)", "x = half_to_float(h);");
  replace(source, R"(asm("{ cvt.rn.f16.f32 %0, %1; }" : "=h"(h) : "f"(x));)", "h = float_to_half(x);");
  source = std::string(kGrid) + source;
  for (const NamedKernel& named : kernels) source += caller_of(named);
  const std::vector<ObjectCode> codes = compile_sources(compiler, {source});
  ASSERT_EQ(codes[0].problem, "") << codes[0].output.substr(0, 4000);
  const auto library = LoadedCode::load(codes[0].bytes);
  unsigned compared[3] = {}, vectors = 0, kept = 0;
  for (unsigned seed = 0; seed < all; ++seed) {
    const NamedKernel& named = kernels[seed];
    const LoopKernel& kernel = named.kernel;
    const CudaPlan plan = cuda_plan(kernel);
    SCOPED_TRACE(to_text(kernel) + emit_cuda_function(named));
    std::vector<Memory> expected = memory_for(kernel, seed, seed % 3 == 0);
    const std::vector<Memory> given = expected;
    Interpreter(kernel, expected).run();
    const bool stable = is_stable(kernel);
    for (const int aligned : {0, 1})
      for (const std::int64_t splits : {1, 3}) {
        if (splits > 1 && kernel.form != LoopForm::Columns) continue;
        std::vector<Memory> actual = given;
        run(*library, named, actual, aligned, splits);
        if (HasFatalFailure()) return;
        if (!stable) continue;
        ++compared[static_cast<std::size_t>(kernel.form)];
        vectors += aligned == 1 && plan.vector > 1;
        kept += plan.resident;
        const double scale = kernel.form == LoopForm::Elements ? 1 : 100;
        for (const LoopStore& store : kernel.stores) {
          const LoopBuffer& buffer = kernel.buffers[store.buffer];
          for (std::int64_t i = 0; i < extent(kernel, buffer); ++i)
            ASSERT_TRUE(is_near(actual[store.buffer].at(i), expected[store.buffer].at(i), buffer.type, scale))
                << "buffer " << store.buffer << ", element " << i << ": " << actual[store.buffer].at(i)
                << " instead of " << expected[store.buffer].at(i) << ", aligned " << aligned << ", splits "
                << splits;
        }
      }
  }
  EXPECT_GT(compared[0], 0u);
  EXPECT_GT(compared[1], 0u);
  EXPECT_GT(compared[2], 0u);
  EXPECT_GT(vectors, 0u);
  EXPECT_GT(kept, 0u);
}

// How rows are divided: as many vectors for a thread as are read at once, and loads kept where they are few.
TEST(CudaText, Plans) {
  LoopKernel kernel;
  kernel.form = LoopForm::Rows;
  kernel.row_dims = 1;
  kernel.sizes = {1000, 768};
  kernel.buffers = {{ElementType::Float, {768, 1}}, {ElementType::Float, {1, 0}, true}};
  const int x = kernel.add({.op = LoopOp::Load});
  kernel.stores = {{kernel.add({.op = LoopOp::RowSum, .operands = {x, kNoOperand, kNoOperand}}), 1}};
  CudaPlan plan = cuda_plan(kernel);
  EXPECT_EQ(plan.vector, 4u);
  EXPECT_EQ(plan.alignment, 16u);
  EXPECT_EQ(plan.threads, 128u);
  EXPECT_EQ(plan.iterations, 2u);
  EXPECT_TRUE(plan.resident);
  EXPECT_EQ(plan.blocks, 1000);
  kernel.sizes[1] = 50257;
  kernel.buffers[0].strides[0] = 50257;
  plan = cuda_plan(kernel);
  EXPECT_EQ(plan.vector, 1u);  // rows begin at any address
  EXPECT_FALSE(plan.resident);
  // A result may be written over what it is computed of, but not over what a later pass reads.
  LoopKernel scaled;
  scaled.form = LoopForm::Rows;
  scaled.row_dims = 1;
  scaled.sizes = {8, 64};
  scaled.buffers = {{ElementType::Float, {64, 1}}, {ElementType::Float, {64, 1}, true}};
  const int y = scaled.add({.op = LoopOp::Load});
  const int sum = scaled.add({.op = LoopOp::RowSum, .operands = {y, kNoOperand, kNoOperand}});
  scaled.stores = {{scaled.add({.op = LoopOp::Divide, .operands = {y, sum, kNoOperand}}), 1}};
  EXPECT_TRUE(may_share_memory_on_cuda(scaled, 0, 1));
  scaled.buffers.push_back({ElementType::Float, {64, 1}, true});
  scaled.stores.push_back({y, 2});
  EXPECT_FALSE(may_share_memory_on_cuda(scaled, 0, 2));
}

}  // namespace cuda_text_test
}  // namespace penstock::graph
