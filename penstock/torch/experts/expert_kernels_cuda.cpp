// Routing and rows on a GPU, compiled from text at first use. All results are deterministic: sums are
// computed in a fixed order, and atomic additions count integers only.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/cuda_text.h"
#include "penstock/torch/experts/expert_kernels.h"

namespace penstock::detail {

namespace {

constexpr unsigned kRowBlock = 256;  // threads
constexpr std::int64_t kWarp = 32;
constexpr std::int64_t kMostExperts = 1024;
constexpr std::int64_t kMostChunks = 128;  // blocks that count and place choices

// One warp per token. Choices are found one after another: the next one is the best of those that come after
// the last one in the order "higher score, then lower index".
constexpr const char* kTopChoices = R"(
extern "C" __global__ void penstock_top_choices(const ELEMENT* scores, i64* choices, i64 tokens, i64 experts, i64 count) {
  const i64 warps = gridDim.x * (i64)(blockDim.x / 32);
  const int lane = threadIdx.x % 32;
  for (i64 token = blockIdx.x * (i64)(blockDim.x / 32) + threadIdx.x / 32; token < tokens; token += warps) {
    const ELEMENT* row = scores + token * experts;
    Number last = INFINITY;
    int last_index = -1;
    for (i64 j = 0; j < count; ++j) {
      Number best = -INFINITY;
      int index = 0x7fffffff;
      for (int expert = lane; expert < experts; expert += 32) {
        Number score = number(row[expert]);
        if (score != score) score = -INFINITY;
        const bool after = score < last || (score == last && expert > last_index);
        if (after && (score > best || (score == best && expert < index))) {
          best = score;
          index = expert;
        }
      }
      for (int offset = 16; offset > 0; offset /= 2) {
        const Number other = __shfl_xor_sync(~0u, best, offset);
        const int other_index = __shfl_xor_sync(~0u, index, offset);
        if (other > best || (other == best && other_index < index)) {
          best = other;
          index = other_index;
        }
      }
      if (lane == 0) choices[token * count + j] = index;
      last = best;
      last_index = index;
    }
  }
}
)";

// A stable counting sort. The choices are divided into chunks, one block each:
//   count  the choices of each expert in each chunk, before[chunk][expert]
//   scan   turns these into the number in earlier chunks; one block
//   place  gives each choice its slot: rank within the warp, plus earlier warps, tiles and chunks
constexpr const char* kExpertOrder = R"(
extern "C" __global__ void penstock_expert_count(const i64* choices, int* before, int* order, i64 total, i64 chunk) {
  __shared__ int counts[EXPERTS];
  for (int expert = threadIdx.x; expert < EXPERTS; expert += blockDim.x) counts[expert] = 0;
  __syncthreads();
  const i64 first = blockIdx.x * chunk, end = first + chunk < total ? first + chunk : total;
  for (i64 i = first + threadIdx.x; i < end; i += blockDim.x) {
    const i64 expert = choices[i];
    if (expert >= 0 && expert < EXPERTS) atomicAdd(&counts[expert], 1);
    order[i] = -1;
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < EXPERTS; expert += blockDim.x) before[blockIdx.x * EXPERTS + expert] = counts[expert];
}

extern "C" __global__ void penstock_expert_scan(int* before, int* ends, int* counts, i64 chunks, i64 capacity) {
  __shared__ int sums[1024];
  const int expert = threadIdx.x;
  int kept = 0;
  if (expert < EXPERTS) {
    int sum = 0;
    for (i64 chunk = 0; chunk < chunks; ++chunk) {
      const int here = before[chunk * EXPERTS + expert];
      before[chunk * EXPERTS + expert] = sum;
      sum += here;
    }
    counts[expert] = sum;
    kept = capacity > 0 && sum > capacity ? (int)capacity : sum;
  }
  sums[expert] = kept;
  __syncthreads();
  for (int offset = 1; offset < 1024; offset *= 2) {
    const int other = expert >= offset ? sums[expert - offset] : 0;
    __syncthreads();
    sums[expert] += other;
    __syncthreads();
  }
  if (expert < EXPERTS) ends[expert] = sums[expert];
}

extern "C" __global__ void penstock_expert_place(const i64* choices, const int* before, const int* ends, int* order, int* slot, i64 total, i64 chunk) {
  __shared__ int earlier[EXPERTS];   // choices of each expert before this tile
  __shared__ int warps[8][EXPERTS];  // and in each warp of this tile
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int expert = threadIdx.x; expert < EXPERTS; expert += 256) {
    earlier[expert] = before[blockIdx.x * EXPERTS + expert];
    for (int w = 0; w < 8; ++w) warps[w][expert] = 0;
  }
  __syncthreads();
  const i64 first = blockIdx.x * chunk, end = first + chunk < total ? first + chunk : total;
  for (i64 tile = first; tile < end; tile += 256) {  // the same for all threads of the block
    const i64 i = tile + threadIdx.x;
    const i64 given = i < end ? choices[i] : -1;
    const int expert = given >= 0 && given < EXPERTS ? (int)given : -1;
    const unsigned same = __match_any_sync(~0u, expert);
    const int rank = __popc(same & ((1u << lane) - 1u));
    if (expert >= 0 && rank == 0) warps[warp][expert] = __popc(same);
    __syncthreads();
    int position = -1;
    if (expert >= 0) {
      int nth = earlier[expert] + rank;
      for (int w = 0; w < warp; ++w) nth += warps[w][expert];
      const int begin = expert == 0 ? 0 : ends[expert - 1];
      if (nth < ends[expert] - begin) {
        position = begin + nth;
        order[position] = (int)i;
      }
    }
    if (i < end) slot[i] = position;
    __syncthreads();
    for (int e = threadIdx.x; e < EXPERTS; e += 256) {
      int sum = 0;
      for (int w = 0; w < 8; ++w) {
        sum += warps[w][e];
        warps[w][e] = 0;
      }
      earlier[e] += sum;
    }
    __syncthreads();
  }
}
)";

// PACK elements are read and written at a time.
constexpr const char* kRows = R"(
__device__ inline Pack zero_pack() {
  Pack pack;
  for (int j = 0; j < PACK; ++j) put(pack.at[j], 0);
  return pack;
}

extern "C" __global__ void penstock_gather_rows(const Pack* tokens, const int* order, Pack* rows, i64 slots, i64 packs, i64 choices) {
  const i64 total = slots * packs;
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < total; i += gridDim.x * (i64)blockDim.x) {
    const i64 slot = i / packs, column = i - slot * packs;
    const int choice = order[slot];
    rows[i] = choice < 0 ? zero_pack() : tokens[choice / (int)choices * packs + column];
  }
}

extern "C" __global__ void penstock_combine_rows(const Pack* rows, const int* slots, const Number* weights, Pack* sums, i64 tokens, i64 packs, i64 choices) {
  const i64 total = tokens * packs;
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < total; i += gridDim.x * (i64)blockDim.x) {
    const i64 token = i / packs, column = i - token * packs;
    Number sum[PACK];
    for (int j = 0; j < PACK; ++j) sum[j] = 0;
    for (i64 choice = token * choices; choice < (token + 1) * choices; ++choice) {
      const int slot = slots[choice];
      if (slot < 0) continue;
      const Pack row = rows[slot * packs + column];
      const Number weight = weights ? weights[choice] : (Number)1;
      for (int j = 0; j < PACK; ++j) sum[j] += weight * number(row.at[j]);
    }
    Pack result;
    for (int j = 0; j < PACK; ++j) put(result.at[j], sum[j]);
    sums[i] = result;
  }
}

// One warp per choice. There are as many slots as choices, and the warp also clears the slot of its own number
// if no choice is in it.
extern "C" __global__ void penstock_combine_rows_backward(const Pack* rows, const Number* weights, const int* order, const int* slots, const Pack* gradient,
                                                          Pack* row_gradient, Number* weight_gradient, i64 total, i64 packs, i64 choices) {
  const i64 warps = gridDim.x * (i64)(blockDim.x / 32);
  const int lane = threadIdx.x % 32;
  for (i64 choice = blockIdx.x * (i64)(blockDim.x / 32) + threadIdx.x / 32; choice < total; choice += warps) {
    const int slot = slots[choice];
    Number product = 0;
    if (slot >= 0) {
      const Number weight = weights[choice];
      const Pack *row = rows + slot * packs, *in = gradient + choice / choices * packs;
      for (i64 column = lane; column < packs; column += 32) {
        const Pack values = row[column], g = in[column];
        Pack scaled;
        for (int j = 0; j < PACK; ++j) {
          product += number(values.at[j]) * number(g.at[j]);
          put(scaled.at[j], weight * number(g.at[j]));
        }
        row_gradient[slot * packs + column] = scaled;
      }
    }
    for (int offset = 16; offset > 0; offset /= 2) product += __shfl_xor_sync(~0u, product, offset);
    if (lane == 0) weight_gradient[choice] = product;
    if (order[choice] < 0)
      for (i64 column = lane; column < packs; column += 32) row_gradient[choice * packs + column] = zero_pack();
  }
}
)";

// Rows of `first` and `second` packs. A warp reads and writes neighbouring packs.
constexpr const char* kColumns = R"(
template <class Element> struct alignas(sizeof(Element) * PACK) PackOf { Element at[PACK]; };

template <class To, class From> __device__ inline PackOf<To> cast(const PackOf<From>& given) {
  PackOf<To> result;
  for (int j = 0; j < PACK; ++j) put(result.at[j], number(given.at[j]));
  return result;
}

extern "C" __global__ void penstock_join_columns(const PackOf<PART>* a, const PackOf<PART>* b, PackOf<JOINT>* joint, INDEX total, INDEX first, INDEX second) {
  const INDEX across = first + second;
  for (INDEX i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
    const INDEX row = i / across, column = i - row * across;
    joint[i] = cast<JOINT>(column < first ? a[row * first + column] : b[row * second + column - first]);
  }
}

extern "C" __global__ void penstock_split_columns(const PackOf<JOINT>* joint, PackOf<PART>* a, PackOf<PART>* b, INDEX total, INDEX first, INDEX second) {
  const INDEX across = first + second;
  for (INDEX i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
    const INDEX row = i / across, column = i - row * across;
    const PackOf<PART> part = cast<PART>(joint[i]);
    if (column < first)
      a[row * first + column] = part;
    else
      b[row * second + column - first] = part;
  }
}
)";

void launch_columns(const char* name, const at::Tensor& joint, const at::Tensor& first,
                    const at::Tensor& second, bool join) {
  const at::Tensor other = second.defined() ? second : first;
  const std::int64_t a = first.size(-1), b = second.defined() ? second.size(-1) : 0;
  const std::int64_t pack = cuda_pack(
      std::gcd(a, b), 16 / std::max(joint.element_size(), first.element_size()), {joint, first, other});
  // Division of 32-bit numbers is several times faster.
  const bool small = joint.numel() / pack < std::numeric_limits<std::int32_t>::max() / 2;
  CudaKernel& kernel = text_kernel(name, {kColumns},
                                   {{"PART", cuda_element(first.scalar_type())},
                                    {"JOINT", cuda_element(joint.scalar_type())},
                                    {"PACK", std::to_string(pack)},
                                    {"INDEX", small ? "unsigned" : "i64"}});
  const unsigned blocks = looping_blocks(joint.numel() / pack, kRowBlock, joint.get_device());
  const auto launch = [&](auto... pointers) {
    if (small)
      kernel.launch(joint.get_device(), blocks, kRowBlock, pointers...,
                    static_cast<unsigned>(joint.numel() / pack), static_cast<unsigned>(a / pack),
                    static_cast<unsigned>(b / pack));
    else
      kernel.launch(joint.get_device(), blocks, kRowBlock, pointers..., device_number(joint.numel() / pack),
                    device_number(a / pack), device_number(b / pack));
  };
  if (join)
    launch(device_in(first), device_in(second), device_out(joint));
  else
    launch(device_in(joint), device_out(first), device_out(second));
}

CudaKernel& row_kernel(const char* name, at::ScalarType dtype, std::int64_t pack) {
  return text_kernel(name, {kRows}, {{"ELEMENT", cuda_element(dtype)}, {"PACK", std::to_string(pack)}});
}

}  // namespace

void launch_top_choices(const at::Tensor& scores, const at::Tensor& choices) {
  if (choices.numel() == 0) return;
  const int device = scores.get_device();
  text_kernel("penstock_top_choices", {kTopChoices}, {{"ELEMENT", cuda_element(scores.scalar_type())}})
      .launch(device, looping_blocks(scores.size(0), kRowBlock / kWarp, device), kRowBlock, device_in(scores),
              device_out(choices), device_number(scores.size(0)), device_number(scores.size(1)),
              device_number(choices.size(1)));
}

void launch_expert_order(const at::Tensor& choices, std::int64_t capacity, const at::Tensor& order,
                         const at::Tensor& slot, const at::Tensor& ends, const at::Tensor& counts) {
  const std::int64_t experts = ends.numel(), total = choices.numel();
  if (experts > kMostExperts)
    throw NotImplemented(
        describe("experts on a GPU", fmt::format("{}", experts), fmt::format("at most {}", kMostExperts)));
  const int device = choices.get_device();
  const std::int64_t tile = kRowBlock;
  // Whole tiles per chunk, at least one chunk.
  const std::int64_t tiles = std::max<std::int64_t>(1, (total + tile - 1) / tile);
  const std::int64_t chunk = (tiles + kMostChunks - 1) / kMostChunks * tile;
  const std::int64_t chunks = (tiles * tile + chunk - 1) / chunk;
  const at::Tensor before = at::empty({chunks, experts}, ends.options());
  const auto kernel = [&](const char* name) -> CudaKernel& {
    return text_kernel(name, {kExpertOrder}, {{"ELEMENT", "Float32"}, {"EXPERTS", std::to_string(experts)}});
  };
  kernel("penstock_expert_count")
      .launch(device, static_cast<unsigned>(chunks), kRowBlock, device_in(choices), device_out(before),
              device_out(order), device_number(total), device_number(chunk));
  kernel("penstock_expert_scan")
      .launch(device, 1U, 1024U, device_out(before), device_out(ends), device_out(counts),
              device_number(chunks), device_number(capacity));
  kernel("penstock_expert_place")
      .launch(device, static_cast<unsigned>(chunks), kRowBlock, device_in(choices), device_in(before),
              device_in(ends), device_out(order), device_out(slot), device_number(total),
              device_number(chunk));
}

void launch_gather_rows(const at::Tensor& tokens, const at::Tensor& order, const at::Tensor& rows) {
  const std::int64_t pack = cuda_pack(rows.size(1), {tokens, rows}), packs = rows.size(1) / pack;
  const int device = rows.get_device();
  row_kernel("penstock_gather_rows", rows.scalar_type(), pack)
      .launch(device, looping_blocks(rows.size(0) * packs, kRowBlock, device), kRowBlock, device_in(tokens),
              device_in(order), device_out(rows), device_number(rows.size(0)), device_number(packs),
              device_number(order.numel() / tokens.size(0)));
}

void launch_combine_rows(const at::Tensor& rows, const at::Tensor& slot, const at::Tensor& weights,
                         const at::Tensor& sums) {
  const std::int64_t pack = cuda_pack(rows.size(1), {rows, sums}), packs = rows.size(1) / pack;
  const int device = rows.get_device();
  row_kernel("penstock_combine_rows", rows.scalar_type(), pack)
      .launch(device, looping_blocks(sums.size(0) * packs, kRowBlock, device), kRowBlock, device_in(rows),
              device_in(slot), device_in(weights), device_out(sums), device_number(sums.size(0)),
              device_number(packs), device_number(slot.size(1)));
}

void launch_combine_rows_backward(const at::Tensor& rows, const at::Tensor& weights, const at::Tensor& order,
                                  const at::Tensor& slot, const at::Tensor& gradient,
                                  const at::Tensor& row_gradient, const at::Tensor& weight_gradient) {
  const std::int64_t pack = cuda_pack(rows.size(1), {rows, gradient, row_gradient});
  const std::int64_t packs = rows.size(1) / pack;
  const int device = rows.get_device();
  row_kernel("penstock_combine_rows_backward", rows.scalar_type(), pack)
      .launch(device, looping_blocks(rows.size(0), kRowBlock / kWarp, device), kRowBlock, device_in(rows),
              device_in(weights), device_in(order), device_in(slot), device_in(gradient),
              device_out(row_gradient), device_out(weight_gradient), device_number(rows.size(0)),
              device_number(packs), device_number(slot.size(1)));
}

void launch_join_columns(const at::Tensor& first, const at::Tensor& second, const at::Tensor& joint) {
  launch_columns("penstock_join_columns", joint, first, second, true);
}

void launch_split_columns(const at::Tensor& joint, const at::Tensor& first, const at::Tensor& second) {
  launch_columns("penstock_split_columns", joint, first, second, false);
}

}  // namespace penstock::detail
