// Grouped products on a GPU: LibTorch's where it applies, otherwise kernels compiled from text at first use.
//
// The number of rows of each expert is known on the device only. A product is therefore launched for as many
// tiles as any routing may need: every expert has at most one tile that is not full, so rows / tile + experts
// is enough. A block finds its tile from `ends` by a scan within a warp; blocks without one return at once.
// Rows behind the last end are one more group, whose sums have no terms. For the outer products the tiles are
// those of the results, and the length of each sum is what differs.
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "penstock/torch/compat/cuda_text.h"
#include "penstock/torch/compat/version.h"
#include "penstock/torch/experts/expert_kernels.h"

namespace penstock::detail {
namespace {

// MODE: 0 rows [S, K] * weight [E, K, N], 1 rows [S, K] * weight [E, N, K] transposed, 2 the outer products
// of rows [S, M] and gradient [S, N]. TILE_M x TILE_N elements of the result per block.
constexpr const char* kTiles = R"(
struct Tile {
  int group;        // expert; the number of experts for the rows behind all
  i64 first, rows;  // rows of this tile (MODE 0, 1), or of the expert (MODE 2)
  i64 m, n;         // first element of the result within its matrix; m is 0 for MODE 0, 1
};

// Returns false if there is no such tile.
__device__ inline bool find_tile(const int* ends, int experts, i64 total, i64 m_size, i64 n_size, Tile& tile) {
  const i64 across = (n_size + TILE_N - 1) / TILE_N;
  const i64 column = blockIdx.x % across, index = blockIdx.x / across;
  tile.n = column * TILE_N;
#if MODE == 2
  const i64 down = (m_size + TILE_M - 1) / TILE_M;
  tile.group = (int)(index / down);
  tile.m = index % down * TILE_M;
  tile.first = tile.group == 0 ? 0 : ends[tile.group - 1];
  tile.rows = ends[tile.group] - tile.first;
  return true;
#else
  // Every warp scans the tiles of 32 groups at a time.
  const int lane = threadIdx.x % 32;
  i64 before = 0;
  for (int base = 0; base <= experts; base += 32) {
    const int group = base + lane;
    i64 begin = 0, end = 0;
    if (group <= experts) {
      begin = group == 0 ? 0 : ends[group - 1];
      end = group == experts ? total : ends[group];
    }
    const int tiles = (int)((end - begin + TILE_M - 1) / TILE_M);
    int sum = tiles;  // of the groups up to this one
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(~0u, sum, offset);
      if (lane >= offset) sum += other;
    }
    const bool mine = index >= before + sum - tiles && index < before + sum;
    const unsigned found = __ballot_sync(~0u, mine);
    if (found) {
      const int source = __ffs(found) - 1;
      const int earlier = __shfl_sync(~0u, sum - tiles, source);
      const i64 start = __shfl_sync(~0u, begin, source), stop = __shfl_sync(~0u, end, source);
      const i64 skipped = (index - before - earlier) * TILE_M;
      tile.group = base + source;
      tile.first = start + skipped;
      tile.rows = stop - tile.first < TILE_M ? stop - tile.first : TILE_M;
      tile.m = 0;
      return true;
    }
    before += __shfl_sync(~0u, sum, 31);
  }
  return false;
#endif
}
)";

// Any dtype and any size: 64 x 64 results per block, 4 x 4 per thread, 16 terms at a time through shared
// memory.
constexpr const char* kPlainProduct = R"(
__device__ inline float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ inline double fused(double a, double b, double c) { return __fma_rn(a, b, c); }

extern "C" __global__ void __launch_bounds__(256) penstock_grouped_plain(const ELEMENT* a, const ELEMENT* b, const int* ends, ELEMENT* result, i64 total, i64 experts, i64 m_size,
                                                                         i64 n_size, i64 k_size) {
  Tile tile;
  if (!find_tile(ends, (int)experts, total, m_size, n_size, tile)) return;
  __shared__ Number left[16][65], right[16][65];  // [term][row], [term][column]
  const bool behind = tile.group == experts;
#if MODE == 2
  const i64 terms = tile.rows, rows = m_size - tile.m;
#else
  const i64 terms = behind ? 0 : k_size, rows = tile.rows;
  const ELEMENT* weight = b + (behind ? 0 : tile.group) * k_size * n_size;
#endif
  const i64 columns = n_size - tile.n;
  Number sums[4][4];
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) sums[i][j] = 0;
  const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
  for (i64 k = 0; k < terms; k += 16) {
    for (int i = threadIdx.x; i < 1024; i += 256) {
#if MODE == 2
      const int ka = i / 64, m = i % 64;
      left[ka][m] = k + ka < terms && m < rows ? number(a[(tile.first + k + ka) * m_size + tile.m + m]) : (Number)0;
#else
      const int m = i / 16, ka = i % 16;
      left[ka][m] = k + ka < terms && m < rows ? number(a[(tile.first + m) * k_size + k + ka]) : (Number)0;
#endif
#if MODE == 1
      const int n = i / 16, kb = i % 16;
      right[kb][n] = k + kb < terms && n < columns ? number(weight[(tile.n + n) * k_size + k + kb]) : (Number)0;
#else
      const int kb = i / 64, n = i % 64;
#if MODE == 2
      const ELEMENT* from = b + (tile.first + k + kb) * n_size;
#else
      const ELEMENT* from = weight + (k + kb) * n_size;
#endif
      right[kb][n] = k + kb < terms && n < columns ? number(from[tile.n + n]) : (Number)0;
#endif
    }
    __syncthreads();
    for (int kk = 0; kk < 16; ++kk)
      for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) sums[i][j] = fused(left[kk][row + i], right[kk][column + j], sums[i][j]);
    __syncthreads();
  }
#if MODE == 2
  ELEMENT* to = result + (tile.group * m_size + tile.m) * n_size + tile.n;
#else
  ELEMENT* to = result + tile.first * n_size + tile.n;
#endif
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j)
      if (row + i < rows && column + j < columns) put(to[(row + i) * n_size + column + j], sums[i][j]);
}
)";

// 16-bit dtypes on tensor cores. 128 x 128 results per block of eight warps, 64 x 32 per warp; 32 terms at a
// time, copied asynchronously into three stages of shared memory, which use all of its static 48 KiB.
//
// A stage holds both factors as they are in memory. "Narrow": 128 rows of 32 terms (64 bytes); "wide": 32
// terms of 128 columns (256 bytes). The 16-byte pieces of a row are permuted, by exclusive or with bits of
// the row's index, so that the eight rows that one instruction reads are in different banks. Wide factors are
// transposed while they are read (ldmatrix.trans). Sizes are multiples of 8 elements and rows are aligned to
// 16 bytes: a piece is entirely inside or outside of a matrix; those outside are filled with zeros.
constexpr const char* kTensorCoreProduct = R"(
#define STAGES 3
#define STAGE_BYTES 16384
#define FACTOR_BYTES 8192
#define NARROW 4
#define WIDE 16
#if MODE == 2
#define LEFT WIDE
#else
#define LEFT NARROW
#endif
#if MODE == 1
#define RIGHT NARROW
#else
#define RIGHT WIDE
#endif

__device__ inline void copy_piece(unsigned to, const void* from, bool inside) {
  const int bytes = inside ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void end_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the newest stage have arrived.
__device__ inline void wait_for_stage() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

template <int PIECES>
__device__ inline unsigned piece_at(int row, int piece) {
  const int permuted = PIECES == NARROW ? piece ^ ((row >> 1) & 3) : piece ^ (row & 7);
  return (unsigned)((row * PIECES + permuted) * 16);
}

// Copies the 512 pieces of one factor, two per thread. `rows` and `columns` are what remains of the matrix.
template <int PIECES>
__device__ inline void copy_factor(unsigned to, const ELEMENT* from, i64 stride, i64 rows, i64 columns) {
  for (int i = threadIdx.x; i < 512; i += 256) {
    const int row = i / PIECES, piece = i % PIECES;
    const bool inside = row < rows && piece * 8 < columns;
    copy_piece(to + piece_at<PIECES>(row, piece), inside ? from + row * stride + piece * 8 : from, inside);
  }
}

// Four 8 x 8 matrices; each lane gives the address of one row.
template <int PIECES>
__device__ inline void load_matrices(unsigned (&to)[4], unsigned from) {
  if (PIECES == NARROW)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

__device__ inline void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

struct alignas(4) Pair { ELEMENT at[2]; };

extern "C" __global__ void __launch_bounds__(256, 2) penstock_grouped_tensor_core(const ELEMENT* a, const ELEMENT* b, const int* ends, ELEMENT* result, i64 total, i64 experts,
                                                                                  i64 m_size, i64 n_size, i64 k_size) {
  Tile tile;
  if (!find_tile(ends, (int)experts, total, m_size, n_size, tile)) return;
  alignas(128) __shared__ unsigned char memory[STAGES * STAGE_BYTES];
  const unsigned shared = (unsigned)__cvta_generic_to_shared(memory);
  const bool behind = tile.group == experts;
  const i64 columns = n_size - tile.n;
#if MODE == 2
  const i64 terms = tile.rows, rows = m_size - tile.m;
  const ELEMENT* left = a + tile.first * m_size + tile.m;
  const ELEMENT* right = b + tile.first * n_size + tile.n;
#else
  const i64 terms = behind ? 0 : k_size, rows = tile.rows;
  const ELEMENT* left = a + tile.first * k_size;
  const ELEMENT* right = b + (behind ? 0 : tile.group) * k_size * n_size;
#if MODE == 1
  right += tile.n * k_size;
#else
  right += tile.n;
#endif
#endif
  const i64 steps = (terms + 31) / 32;

  // Copies the factors of one step. The stage is closed even if there is no such step, so that the stages that
  // are waited for can be counted.
  auto copy_step = [&](i64 step) {
    if (step < steps) {
      const unsigned to = shared + (unsigned)(step % STAGES) * STAGE_BYTES;
      const i64 k = step * 32;
#if MODE == 2
      copy_factor<WIDE>(to, left + k * m_size, m_size, terms - k, rows);
#else
      copy_factor<NARROW>(to, left + k, k_size, rows, terms - k);
#endif
#if MODE == 2
      copy_factor<WIDE>(to + FACTOR_BYTES, right + k * n_size, n_size, terms - k, columns);
#elif MODE == 1
      copy_factor<NARROW>(to + FACTOR_BYTES, right + k, k_size, columns, terms - k);
#else
      copy_factor<WIDE>(to + FACTOR_BYTES, right + k * n_size, n_size, terms - k, columns);
#endif
    }
    end_stage();
  };

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_m = warp / 4 * 64, warp_n = warp % 4 * 32;
  float sums[4][4][4];  // [16 rows][8 columns][of this lane]
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j)
      for (int l = 0; l < 4; ++l) sums[i][j][l] = 0.0f;

  copy_step(0);
  copy_step(1);
  for (i64 step = 0; step < steps; ++step) {
    wait_for_stage();
    __syncthreads();  // all threads' copies have arrived, and nobody reads the stage that is filled next
    copy_step(step + 2);
    const unsigned from = shared + (unsigned)(step % STAGES) * STAGE_BYTES;
#pragma unroll
    for (int k = 0; k < 32; k += 16) {
      unsigned fragment[4][4];
      // Matrices of the left factor: rows 0-7 and 8-15 of terms 0-7, then of terms 8-15.
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int m = warp_m + i * 16;
        const unsigned piece = LEFT == NARROW ? piece_at<LEFT>(m + lane % 16, k / 8 + lane / 16)
                                              : piece_at<LEFT>(k + lane % 8 + lane / 16 * 8, m / 8 + lane / 8 % 2);
        load_matrices<LEFT>(fragment[i], from + piece);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int n = warp_n + j * 16;
        // Matrices of the right factor: terms 0-7 and 8-15 of columns 0-7, then of columns 8-15.
        unsigned other[4];
        const unsigned piece = RIGHT == NARROW ? piece_at<RIGHT>(n + lane % 8 + lane / 16 * 8, k / 8 + lane / 8 % 2)
                                               : piece_at<RIGHT>(k + lane % 16, n / 8 + lane / 16);
        load_matrices<RIGHT>(other, from + FACTOR_BYTES + piece);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          multiply_add(sums[i][2 * j], fragment[i], other[0], other[1]);
          multiply_add(sums[i][2 * j + 1], fragment[i], other[2], other[3]);
        }
      }
    }
  }

#if MODE == 2
  ELEMENT* to = result + (tile.group * m_size + tile.m) * n_size + tile.n;
#else
  ELEMENT* to = result + tile.first * n_size + tile.n;
#endif
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j)
      for (int half = 0; half < 2; ++half) {
        const int row = warp_m + i * 16 + half * 8 + lane / 4, column = warp_n + j * 8 + lane % 4 * 2;
        if (row >= rows || column >= columns) continue;
        Pair pair;
        put(pair.at[0], sums[i][j][2 * half]);
        put(pair.at[1], sums[i][j][2 * half + 1]);
        *(Pair*)(to + row * n_size + column) = pair;
      }
}
)";

// LibTorch's grouped product leaves the rows behind the last end and the results of empty experts undefined.
constexpr const char* kClear = R"(
extern "C" __global__ void penstock_clear_behind(const int* ends, uint4* result, i64 experts, i64 rows, i64 pieces) {
  const i64 total = rows * pieces;
  for (i64 i = ends[experts - 1] * pieces + blockIdx.x * (i64)blockDim.x + threadIdx.x; i < total; i += gridDim.x * (i64)blockDim.x)
    result[i] = make_uint4(0, 0, 0, 0);
}

extern "C" __global__ void penstock_clear_empty(const int* ends, uint4* result, i64 pieces) {
  const int expert = blockIdx.x;
  if (ends[expert] != (expert == 0 ? 0 : ends[expert - 1])) return;
  for (i64 i = threadIdx.x; i < pieces; i += blockDim.x) result[expert * pieces + i] = make_uint4(0, 0, 0, 0);
}
)";

constexpr unsigned kProductThreads = 256;

struct ProductSizes {
  std::int64_t rows, experts, m, n, k;  // m: of outer products, k: of products
  std::int64_t tiles(std::int64_t tile, int mode) const {
    const std::int64_t across = (n + tile - 1) / tile;
    return across * (mode == 2 ? experts * ((m + tile - 1) / tile) : rows / tile + experts + 1);
  }
};

// Whether rows can be read 16 bytes at a time.
bool is_wide(const at::Tensor& tensor) {
  return tensor.size(-1) * tensor.element_size() % 16 == 0 &&
         reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % 16 == 0;
}

bool on_tensor_cores(const at::Tensor& a, const at::Tensor& b, const at::Tensor& result) {
  const auto dtype = a.scalar_type();
  return (dtype == at::kBFloat16 || dtype == at::kHalf) &&
         at::cuda::getDeviceProperties(a.get_device())->major >= 8 && is_wide(a) && is_wide(b) &&
         is_wide(result);
}

void launch_tiles(const at::Tensor& a, const at::Tensor& b, const at::Tensor& ends, const at::Tensor& result,
                  const ProductSizes& sizes, int mode) {
  const bool fast = on_tensor_cores(a, b, result);
  const std::int64_t tile = fast ? 128 : 64;
  CudaMacros macros{{"ELEMENT", cuda_element(a.scalar_type())},
                    {"MODE", std::to_string(mode)},
                    {"TILE_M", std::to_string(tile)},
                    {"TILE_N", std::to_string(tile)}};
  if (fast) macros.emplace_back("KIND", a.scalar_type() == at::kHalf ? "\"f16\"" : "\"bf16\"");
  text_kernel(fast ? "penstock_grouped_tensor_core" : "penstock_grouped_plain",
              {kTiles, fast ? kTensorCoreProduct : kPlainProduct}, macros)
      .launch(a.get_device(), static_cast<unsigned>(sizes.tiles(tile, mode)), kProductThreads, device_in(a),
              device_in(b), device_in(ends), device_out(result), device_number(sizes.rows),
              device_number(sizes.experts), device_number(sizes.m), device_number(sizes.n),
              device_number(sizes.k));
}

#if PENSTOCK_TORCH_AT_LEAST(2, 8)
constexpr bool kHasLibraryProduct = true;
at::Tensor library_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& ends) {
  return at::_grouped_mm(a, b, ends);
}
#else
constexpr bool kHasLibraryProduct = false;
at::Tensor library_product(const at::Tensor&, const at::Tensor&, const at::Tensor&) { return {}; }
#endif

// Without waiting for the device, LibTorch's grouped product exists for bfloat16 and Hopper only. `columns`:
// of the result.
bool library_applies(const at::Tensor& a, const at::Tensor& b, std::int64_t columns) {
  return kHasLibraryProduct && a.scalar_type() == at::kBFloat16 &&
         at::cuda::getDeviceProperties(a.get_device())->major == 9 && is_wide(a) && is_wide(b) &&
         columns * a.element_size() % 16 == 0;
}

CudaKernel& clear_kernel(const char* name) { return text_kernel(name, {kClear}, {}); }

}  // namespace

at::Tensor launch_grouped_product(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& ends,
                                  bool transposed, bool library) {
  const std::int64_t columns = weight.size(transposed ? 1 : 2);
  if (library && library_applies(rows, weight, columns)) {
    const at::Tensor product = library_product(rows, transposed ? weight.transpose(1, 2) : weight, ends);
    const std::int64_t pieces = product.size(1) * product.element_size() / 16;
    // A few blocks: usually there is nothing behind the last end.
    clear_kernel("penstock_clear_behind")
        .launch(rows.get_device(), static_cast<unsigned>(multiprocessors(rows.get_device())), kProductThreads,
                device_in(ends), device_out(product), device_number(ends.numel()),
                device_number(product.size(0)), device_number(pieces));
    return product;
  }
  at::Tensor result = at::empty({rows.size(0), columns}, rows.options());
  launch_tiles(rows, weight, ends, result,
               {.rows = rows.size(0), .experts = ends.numel(), .m = 0, .n = columns, .k = rows.size(1)},
               transposed ? 1 : 0);
  return result;
}

at::Tensor launch_grouped_outer(const at::Tensor& rows, const at::Tensor& gradient, const at::Tensor& ends,
                                bool library) {
  if (library && library_applies(rows, gradient, gradient.size(1))) {
    const at::Tensor product = library_product(rows.t(), gradient, ends);
    clear_kernel("penstock_clear_empty")
        .launch(rows.get_device(), static_cast<unsigned>(ends.numel()), 1024U, device_in(ends),
                device_out(product),
                device_number(product.size(1) * product.size(2) * product.element_size() / 16));
    return product;
  }
  at::Tensor result = at::empty({ends.numel(), rows.size(1), gradient.size(1)}, rows.options());
  launch_tiles(
      rows, gradient, ends, result,
      {.rows = rows.size(0), .experts = ends.numel(), .m = rows.size(1), .n = gradient.size(1), .k = 0}, 2);
  return result;
}

}  // namespace penstock::detail
