// The kernels of scan_device.h, compiled from text at first use.
#include <ATen/ATen.h>

#include <type_traits>

#include "penstock/torch/scan/scan_device.h"
#include "penstock/torch/scan/scan_kernel.h"

namespace penstock::detail {
namespace {

constexpr unsigned kScanThreads = 256;
constexpr std::int64_t kTeam = 8;  // lanes that share a row of one head
constexpr std::int64_t kScanWarp = 32;

// Where things are. A chunk is numbered over the whole batch, and so is a token.
constexpr const char* kScanPlaces = R"(
struct Shape { i64 batch, length, heads, head_width, groups, state_size, chunk, chunks; };

struct alignas(sizeof(REAL) * PACK) RealPack { REAL at[PACK]; };  // results of products that are not rounded

// A token and a head, and the elements [p, p + PACK) of that head.
struct Place {
  i64 token, head, p, chunk, within;  // within: the token in its chunk
  __device__ Place(const Shape& s, i64 token, i64 head, i64 p)
      : token(token), head(head), p(p), chunk(token / s.chunk), within(token % s.chunk) {}
  __device__ i64 token_major(const Shape& s) const { return (token * s.heads + head) * s.head_width + p; }
  __device__ i64 head_major(const Shape& s) const { return row(s) * s.head_width + p; }
  __device__ i64 group_major(const Shape& s) const {
    const i64 members = s.heads / s.groups;
    return (((chunk * s.groups + head / members) * s.chunk + within) * members + head % members) * s.head_width + p;
  }
  __device__ i64 row(const Shape& s) const { return (chunk * s.heads + head) * s.chunk + within; }  // in sums
};

// The beginning of the document of a token, relative to its chunk; negative if it is before the chunk.
__device__ inline i64 document_begin(const Shape& s, const int* starts, i64 token) {
  return starts ? starts[token] - token / s.chunk % s.chunks * s.chunk : -1;
}
// The decay from the state before the chunk to a token, and from a token to the state after the chunk.
__device__ inline REAL decay_until(const Shape& s, const int* starts, const REAL* sums, const Place& at) {
  return document_begin(s, starts, at.token) < 0 ? growth(sums[at.row(s)]) : REAL(0);
}
__device__ inline REAL decay_after(const Shape& s, const int* starts, const REAL* sums, const Place& at) {
  const i64 end = at.row(s) - at.within + s.chunk - 1;
  return at.within >= document_begin(s, starts, at.token - at.within + s.chunk - 1) ? growth(sums[end] - sums[at.row(s)]) : REAL(0);
}
// The decay of a state from one chunk to the next.
__device__ inline REAL decay_of_chunk(const Shape& s, const int* starts, const REAL* sums, i64 chunk, i64 head) {
  return decay_until(s, starts, sums, Place(s, (chunk + 1) * s.chunk - 1, head, 0));
}
__device__ inline i64 thread_number() { return blockIdx.x * (i64)blockDim.x + threadIdx.x; }
__device__ inline REAL warp_sum(REAL x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}
)";

constexpr const char* kSums = R"(
extern "C" __global__ void penstock_scan_sums(Shape s, const REAL* steps, const REAL* decay, REAL* sums) {
  const i64 i = thread_number();
  if (i >= s.batch * s.length * s.heads) return;
  const i64 within = i % s.chunk, head = i / s.chunk % s.heads, first = i / s.chunk / s.heads * s.chunk;
  REAL sum = 0;
  for (i64 k = 0; k <= within; ++k) sum += steps[(first + k) * s.heads + head];
  sums[i] = sum * decay[head];
}
)";

constexpr const char* kWeights = R"(
extern "C" __global__ void penstock_scan_weights(Shape s, const int* starts, const REAL* sums, const ELEMENT* gram, Pack* weights) {
  const i64 i = thread_number(), packs = s.chunk / PACK;
  if (i >= s.batch * s.chunks * s.heads * s.chunk * packs) return;
  const i64 first = i % packs * PACK, within = i / packs % s.chunk, head = i / packs / s.chunk % s.heads, chunk = i / packs / s.chunk / s.heads;
  Pack result;
  if (first > within) {
    for (int j = 0; j < PACK; ++j) put(result.at[j], REAL(0));
  } else {
    const i64 begin = document_begin(s, starts, chunk * s.chunk + within);
    const i64 group = head / (s.heads / s.groups);
    const Pack products = *(const Pack*)(gram + ((chunk * s.groups + group) * s.chunk + within) * s.chunk + first);
    const REAL* own = sums + (chunk * s.heads + head) * s.chunk;
    for (int j = 0; j < PACK; ++j) {
      const i64 other = first + j;
      const bool counts = other <= within && other >= begin;
      put(result.at[j], counts ? number(products.at[j]) * growth(own[within] - own[other]) : REAL(0));
    }
  }
  weights[i] = result;
}
)";

constexpr const char* kInputs = R"(
extern "C" __global__ void penstock_scan_inputs(Shape s, const int* starts, const REAL* sums, const ELEMENT* values, const REAL* steps, ELEMENT* inputs, ELEMENT* passed) {
  const i64 i = thread_number(), packs = s.head_width / PACK;
  if (i >= s.batch * s.length * s.heads * packs) return;
  const Place at(s, i / packs / s.heads, i / packs % s.heads, i % packs * PACK);
  const REAL step = steps[i / packs], after = decay_after(s, starts, sums, at);
  const Pack value = *(const Pack*)(values + at.token_major(s));
  Pack input, scaled;
  for (int j = 0; j < PACK; ++j) {
    const REAL x = number(value.at[j]) * step;
    put(input.at[j], x);
    put(scaled.at[j], x * after);
  }
  *(Pack*)(inputs + at.head_major(s)) = input;
  *(Pack*)(passed + at.group_major(s)) = scaled;
}

extern "C" __global__ void penstock_scan_gradients(Shape s, const int* starts, const REAL* sums, const ELEMENT* gradient, ELEMENT* arrived, ELEMENT* scaled) {
  const i64 i = thread_number(), packs = s.head_width / PACK;
  if (i >= s.batch * s.length * s.heads * packs) return;
  const Place at(s, i / packs / s.heads, i / packs % s.heads, i % packs * PACK);
  const REAL until = decay_until(s, starts, sums, at);
  const Pack given = *(const Pack*)(gradient + at.token_major(s));
  Pack result;
  for (int j = 0; j < PACK; ++j) put(result.at[j], number(given.at[j]) * until);
  *(Pack*)(arrived + at.head_major(s)) = given;
  *(Pack*)(scaled + at.group_major(s)) = result;
}
)";

// A thread follows PACK elements of a state from chunk to chunk; they belong to one head.
constexpr const char* kPass = R"(
extern "C" __global__ void penstock_scan_pass(Shape s, const int* starts, const REAL* sums, const ELEMENT* added, const REAL* initial, ELEMENT* states, REAL* last) {
  const i64 members = s.heads / s.groups, width = members * s.head_width, size = s.groups * s.state_size * width, packs = size / PACK;
  const i64 i = thread_number();
  if (i >= s.batch * packs) return;
  const i64 row = i / packs, element = i % packs * PACK;
  const i64 head = element / (s.state_size * width) * members + element % width / s.head_width;
  REAL running[PACK];
  for (int j = 0; j < PACK; ++j) running[j] = initial ? initial[row * size + element + j] : REAL(0);
  for (i64 c = 0; c < s.chunks; ++c) {
    const i64 chunk = row * s.chunks + c;
    const REAL decay = decay_of_chunk(s, starts, sums, chunk, head);
    const Pack more = *(const Pack*)(added + chunk * size + element);
    Pack before;
    for (int j = 0; j < PACK; ++j) {
      put(before.at[j], running[j]);
      running[j] = running[j] * decay + number(more.at[j]);
    }
    *(Pack*)(states + chunk * size + element) = before;
  }
  for (int j = 0; j < PACK; ++j) last[row * size + element + j] = running[j];
}

extern "C" __global__ void penstock_scan_pass_backward(Shape s, const int* starts, const REAL* sums, const ELEMENT* added, const REAL* last, ELEMENT* gradients, REAL* initial) {
  const i64 members = s.heads / s.groups, width = members * s.head_width, size = s.groups * s.state_size * width, packs = size / PACK;
  const i64 i = thread_number();
  if (i >= s.batch * packs) return;
  const i64 row = i / packs, element = i % packs * PACK;
  const i64 head = element / (s.state_size * width) * members + element % width / s.head_width;
  REAL running[PACK];
  for (int j = 0; j < PACK; ++j) running[j] = last ? last[row * size + element + j] : REAL(0);
  for (i64 c = s.chunks - 1; c >= 0; --c) {
    const i64 chunk = row * s.chunks + c;
    const REAL decay = decay_of_chunk(s, starts, sums, chunk, head);
    const Pack more = *(const Pack*)(added + chunk * size + element);
    Pack after;
    for (int j = 0; j < PACK; ++j) {
      put(after.at[j], running[j]);
      running[j] = running[j] * decay + number(more.at[j]);
    }
    *(Pack*)(gradients + chunk * size + element) = after;
  }
  for (int j = 0; j < PACK; ++j) initial[row * size + element + j] = running[j];
}
)";

constexpr const char* kJoin = R"(
extern "C" __global__ void penstock_scan_join(Shape s, const int* starts, const REAL* sums, const ELEMENT* inside, const ELEMENT* read, const ELEMENT* values, const REAL* skip, ELEMENT* results) {
  const i64 i = thread_number(), packs = s.head_width / PACK;
  if (i >= s.batch * s.length * s.heads * packs) return;
  const Place at(s, i / packs / s.heads, i / packs % s.heads, i % packs * PACK);
  const REAL until = decay_until(s, starts, sums, at), keep = skip[at.head];
  const Pack a = *(const Pack*)(inside + at.head_major(s)), b = *(const Pack*)(read + at.group_major(s)), c = *(const Pack*)(values + at.token_major(s));
  Pack result;
  for (int j = 0; j < PACK; ++j) put(result.at[j], number(a.at[j]) + until * number(b.at[j]) + keep * number(c.at[j]));
  *(Pack*)(results + at.token_major(s)) = result;
}
)";

// A warp computes one row of to_gram; each lane has COLUMNS packs of it.
//
// The gradient of a decay is a difference: the sums over the rows of weights * products, less those over the
// columns (join_backward). Both must have the same terms, or what is left is their rounding: products and the
// sums over columns are therefore not rounded to 16 bits, and both use the rounded weights and inputs. The
// weight of a token's own input is not decayed: it is in neither, but in own_weights.
constexpr const char* kWeightsBackward = R"(
extern "C" __global__ void penstock_scan_weights_backward(Shape s, const int* starts, const REAL* sums, const ELEMENT* gram, const REAL* products, ELEMENT* weights, ELEMENT* to_gram, REAL* row_sums, REAL* own_weights) {
  const i64 row = thread_number() / 32, lane = threadIdx.x % 32;
  if (row >= s.batch * s.chunks * s.groups * s.chunk) return;
  const i64 within = row % s.chunk, group = row / s.chunk % s.groups, chunk = row / s.chunk / s.groups, members = s.heads / s.groups;
  const i64 begin = document_begin(s, starts, chunk * s.chunk + within);
  REAL dots[COLUMNS][PACK], mixed[COLUMNS][PACK];
  for (int k = 0; k < COLUMNS; ++k) {
    const i64 first = (lane + 32 * k) * PACK;
    for (int j = 0; j < PACK; ++j) {
      dots[k][j] = first + j < s.chunk ? number(gram[row * s.chunk + first + j]) : REAL(0);
      mixed[k][j] = 0;
    }
  }
  for (i64 head = group * members; head < (group + 1) * members; ++head) {
    const i64 base = (chunk * s.heads + head) * s.chunk;
    const REAL own = sums[base + within];
    REAL total = 0;
    for (int k = 0; k < COLUMNS; ++k) {
      const i64 first = (lane + 32 * k) * PACK;
      if (first >= s.chunk) continue;
      const i64 place = (base + within) * s.chunk + first;
      const RealPack given = *(const RealPack*)(products + place);
      Pack rounded;
      for (int j = 0; j < PACK; ++j) {
        const i64 other = first + j;
        if (other < within && other >= begin) {
          const REAL decay = growth(own - sums[base + other]);
          mixed[k][j] += decay * given.at[j];
          put(rounded.at[j], decay * dots[k][j]);
          total += number(rounded.at[j]) * given.at[j];  // as the sums over rows have it
        } else {
          put(rounded.at[j], REAL(0));
          if (other != within) continue;
          mixed[k][j] += given.at[j];
          own_weights[base + within] = dots[k][j];
        }
      }
      *(Pack*)(weights + place) = rounded;
    }
    total = warp_sum(total);
    if (lane == 0) row_sums[base + within] = total;
  }
  for (int k = 0; k < COLUMNS; ++k) {
    const i64 first = (lane + 32 * k) * PACK;
    if (first >= s.chunk) continue;
    Pack result;
    for (int j = 0; j < PACK; ++j) put(result.at[j], mixed[k][j]);
    *(Pack*)(to_gram + row * s.chunk + first) = result;
  }
}
)";

// A block computes one chunk and head.
constexpr const char* kEnds = R"(
extern "C" __global__ void penstock_scan_ends(Shape s, const int* starts, const REAL* sums, const ELEMENT* states, const ELEMENT* gradients, REAL* ends) {
  const i64 members = s.heads / s.groups, width = members * s.head_width, size = s.groups * s.state_size * width;
  const i64 chunk = blockIdx.x / s.heads, head = blockIdx.x % s.heads, packs = s.head_width / PACK;
  const i64 base = head / members * s.state_size * width + head % members * s.head_width;
  REAL sum = 0;
  for (i64 i = threadIdx.x; i < s.state_size * packs; i += blockDim.x) {
    const i64 element = base + i / packs * width + i % packs * PACK;
    const Pack gradient = *(const Pack*)(gradients + chunk * size + element), state = *(const Pack*)(states + chunk * size + element);
    for (int j = 0; j < PACK; ++j) sum += number(state.at[j]) * number(gradient.at[j]);
  }
  sum = warp_sum(sum);
  __shared__ REAL warps[32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int k = 1; k < blockDim.x / 32; ++k) sum += warps[k];
  ends[blockIdx.x] = sum * decay_of_chunk(s, starts, sums, chunk, head);
}
)";

// TEAM neighbouring lanes share a token and head.
constexpr const char* kJoinBackward = R"(
extern "C" __global__ void penstock_scan_join_backward(Shape s, const int* starts, const REAL* sums, const ELEMENT* values, const REAL* steps, const REAL* skip, const ELEMENT* gradient,
                                                      const REAL* inside, const ELEMENT* passed, const ELEMENT* read, ELEMENT* to_values, REAL* row_sums, const REAL* own_weights,
                                                      REAL* input_sums, REAL* state_sums, REAL* skip_sums) {
  const i64 rows = s.batch * s.length * s.heads, number_of_row = thread_number() / TEAM, lane = threadIdx.x % TEAM;
  const bool counts = number_of_row < rows;
  const i64 row = counts ? number_of_row : rows - 1;  // all lanes take part in the sums
  const Place at(s, row / s.heads, row % s.heads, 0);
  const REAL step = steps[row], keep = skip[at.head], after = decay_after(s, starts, sums, at), own = own_weights[at.row(s)];
  REAL inside_sum = 0, input_sum = 0, passed_sum = 0, read_sum = 0, skip_sum = 0;
  for (i64 p = lane * PACK; p < s.head_width; p += TEAM * PACK) {
    const Pack value = *(const Pack*)(values + at.token_major(s) + p), given = *(const Pack*)(gradient + at.token_major(s) + p);
    const RealPack within = *(const RealPack*)(inside + at.head_major(s) + p);
    const Pack from_state = *(const Pack*)(passed + at.group_major(s) + p);
    const Pack of_state = *(const Pack*)(read + at.group_major(s) + p);
    Pack result;
    for (int j = 0; j < PACK; ++j) {
      const REAL x = number(value.at[j]), g = number(given.at[j]), here = within.at[j] + own * g, later = after * number(from_state.at[j]);
      ELEMENT input;  // as the products took it
      put(input, x * step);
      inside_sum += x * here;
      input_sum += number(input) * within.at[j];
      passed_sum += x * later;
      read_sum += g * number(of_state.at[j]);
      skip_sum += g * x;
      put(result.at[j], step * (here + later) + keep * g);
    }
    if (counts) *(Pack*)(to_values + at.token_major(s) + p) = result;
  }
  for (int offset = TEAM / 2; offset > 0; offset /= 2) {
    inside_sum += __shfl_xor_sync(~0u, inside_sum, offset);
    input_sum += __shfl_xor_sync(~0u, input_sum, offset);
    passed_sum += __shfl_xor_sync(~0u, passed_sum, offset);
    read_sum += __shfl_xor_sync(~0u, read_sum, offset);
    skip_sum += __shfl_xor_sync(~0u, skip_sum, offset);
  }
  if (!counts || lane != 0) return;
  const i64 place = at.row(s);
  row_sums[place] += decay_until(s, starts, sums, at) * read_sum - input_sum;
  input_sums[place] = inside_sum + passed_sum;
  state_sums[place] = step * passed_sum;
  skip_sums[place] = skip_sum;
}
)";

// A decay acts on all pairs of tokens around it that are of one document, on the inputs before it that reach
// the next chunk, and on the state that passes through the chunk.
constexpr const char* kStepsBackward = R"(
extern "C" __global__ void penstock_scan_steps_backward(Shape s, const int* starts, const REAL* row_sums, const REAL* input_sums, const REAL* state_sums, const REAL* ends, const REAL* steps, const REAL* decay, REAL* to_steps, REAL* to_decay) {
  const i64 i = thread_number();
  if (i >= s.batch * s.length * s.heads) return;
  const i64 within = i % s.chunk, head = i / s.chunk % s.heads, first = i / s.chunk / s.heads * s.chunk, token = first + within;
  REAL sum = 0;
  if (document_begin(s, starts, token) != within) {
    for (i64 k = within; k < s.chunk; ++k) {
      if (starts && starts[first + k] != starts[token]) break;
      sum += row_sums[i - within + k];
    }
    for (i64 k = 0; k < within; ++k) sum += state_sums[i - within + k];
    sum += ends[i / s.chunk];
  }
  const i64 place = token * s.heads + head;
  to_steps[place] = decay[head] * sum + input_sums[i];
  to_decay[i] = steps[place] * sum;
}
)";

// A warp has one row of the state of a head; each lane COLUMNS elements of it.
constexpr const char* kStep = R"(
extern "C" __global__ void penstock_scan_step(Shape s, const ELEMENT* values, const REAL* steps, const REAL* decay, const ELEMENT* keys, const ELEMENT* queries, const REAL* skip, REAL* states,
                                             ELEMENT* results) {
  const i64 row = thread_number() / 32, lane = threadIdx.x % 32;
  if (row >= s.batch * s.heads * s.head_width) return;
  const i64 p = row % s.head_width, head = row / s.head_width % s.heads, batch = row / s.head_width / s.heads;
  REAL state[COLUMNS];
  for (int k = 0; k < COLUMNS; ++k) state[k] = lane + 32 * k < s.state_size ? states[row * s.state_size + lane + 32 * k] : REAL(0);
  for (i64 t = 0; t < s.length; ++t) {
    const i64 token = batch * s.length + t, place = token * s.heads + head;
    const i64 group = (token * s.groups + head / (s.heads / s.groups)) * s.state_size;
    const REAL step = steps[place], factor = growth(step * decay[head]), value = number(values[place * s.head_width + p]);
    REAL sum = 0;
    for (int k = 0; k < COLUMNS; ++k) {
      const i64 n = lane + 32 * k;
      if (n >= s.state_size) continue;
      state[k] = state[k] * factor + step * value * number(keys[group + n]);
      sum += state[k] * number(queries[group + n]);
    }
    sum = warp_sum(sum);
    if (lane == 0) put(results[place * s.head_width + p], sum + skip[head] * value);
  }
  for (int k = 0; k < COLUMNS; ++k)
    if (lane + 32 * k < s.state_size) states[row * s.state_size + lane + 32 * k] = state[k];
}
)";

// As the kernels see it.
static_assert(sizeof(ScanShape) == 8 * sizeof(long long) && std::is_trivially_copyable_v<ScanShape>);

CudaKernel& device_kernel(const char* name, const char* text, const ScanTensors& in, std::int64_t pack,
                          std::int64_t columns = 1) {
  return scan_kernel(name, {kScanPlaces, text}, in.values.scalar_type(),
                     {{"PACK", pack}, {"COLUMNS", columns}, {"TEAM", kTeam}});
}

std::int64_t most_of(const ScanTensors& in) { return 16 / in.values.element_size(); }
std::int64_t tokens_and_heads(const ScanShape& s) { return s.batch * s.length * s.heads; }
std::int64_t state_elements(const ScanShape& s) { return s.batch * s.state_size * s.inner(); }
int device_of(const ScanTensors& in) { return in.values.get_device(); }

}  // namespace

void launch_sums(const ScanTensors& in, const at::Tensor& sums) {
  device_kernel("penstock_scan_sums", kSums, in, 1)
      .launch(device_of(in), blocks_of(tokens_and_heads(in.shape), kScanThreads), kScanThreads, in.shape,
              device_in(in.steps), device_in(in.decay), device_out(sums));
}

void launch_weights(const ScanTensors& in, const at::Tensor& sums, const at::Tensor& gram,
                    const at::Tensor& weights) {
  const ScanShape& s = in.shape;
  const std::int64_t pack = cuda_pack(s.chunk, most_of(in), {gram, weights});
  device_kernel("penstock_scan_weights", kWeights, in, pack)
      .launch(device_of(in), blocks_of(weights.numel() / pack, kScanThreads), kScanThreads, s,
              device_in(in.starts), device_in(sums), device_in(gram), device_out(weights));
}

void launch_inputs(const ScanTensors& in, const at::Tensor& sums, const at::Tensor& inputs,
                   const at::Tensor& passed) {
  const std::int64_t pack = cuda_pack(in.shape.head_width, most_of(in), {in.values, inputs, passed});
  device_kernel("penstock_scan_inputs", kInputs, in, pack)
      .launch(device_of(in), blocks_of(in.values.numel() / pack, kScanThreads), kScanThreads, in.shape,
              device_in(in.starts), device_in(sums), device_in(in.values), device_in(in.steps),
              device_out(inputs), device_out(passed));
}

void launch_pass(const ScanTensors& in, const at::Tensor& sums, const at::Tensor& added,
                 const at::Tensor& states, const at::Tensor& last) {
  const std::int64_t pack = cuda_pack(in.shape.head_width, most_of(in), {added, states});
  device_kernel("penstock_scan_pass", kPass, in, pack)
      .launch(device_of(in), blocks_of(state_elements(in.shape) / pack, kScanThreads), kScanThreads, in.shape,
              device_in(in.starts), device_in(sums), device_in(added), device_in(in.initial),
              device_out(states), device_out(last));
}

void launch_join(const ScanTensors& in, const at::Tensor& sums, const at::Tensor& inside,
                 const at::Tensor& read, const at::Tensor& result) {
  const std::int64_t pack = cuda_pack(in.shape.head_width, most_of(in), {in.values, inside, read, result});
  device_kernel("penstock_scan_join", kJoin, in, pack)
      .launch(device_of(in), blocks_of(in.values.numel() / pack, kScanThreads), kScanThreads, in.shape,
              device_in(in.starts), device_in(sums), device_in(inside), device_in(read), device_in(in.values),
              device_in(in.skip), device_out(result));
}

void launch_gradients(const ScanTensors& in, const at::Tensor& sums, const at::Tensor& gradient,
                      const at::Tensor& arrived, const at::Tensor& scaled) {
  const std::int64_t pack = cuda_pack(in.shape.head_width, most_of(in), {gradient, arrived, scaled});
  device_kernel("penstock_scan_gradients", kInputs, in, pack)
      .launch(device_of(in), blocks_of(gradient.numel() / pack, kScanThreads), kScanThreads, in.shape,
              device_in(in.starts), device_in(sums), device_in(gradient), device_out(arrived),
              device_out(scaled));
}

void launch_weights_backward(const ScanTensors& in, const at::Tensor& sums, const at::Tensor& gram,
                             const at::Tensor& products, const at::Tensor& weights, const at::Tensor& to_gram,
                             const at::Tensor& row_sums, const at::Tensor& own_weights) {
  const ScanShape& s = in.shape;
  const std::int64_t pack = cuda_pack(s.chunk, 4, {gram, products, weights, to_gram}),
                     columns = (s.chunk + kScanWarp * pack - 1) / (kScanWarp * pack);
  device_kernel("penstock_scan_weights_backward", kWeightsBackward, in, pack, columns)
      .launch(device_of(in), blocks_of(gram.numel() / s.chunk * kScanWarp, kScanThreads), kScanThreads, s,
              device_in(in.starts), device_in(sums), device_in(gram), device_in(products),
              device_out(weights), device_out(to_gram), device_out(row_sums), device_out(own_weights));
}

void launch_pass_backward(const ScanTensors& in, const at::Tensor& sums, const at::Tensor& added,
                          const at::Tensor& from_last, const at::Tensor& gradients,
                          const at::Tensor& initial) {
  const std::int64_t pack = cuda_pack(in.shape.head_width, most_of(in), {added, gradients});
  device_kernel("penstock_scan_pass_backward", kPass, in, pack)
      .launch(device_of(in), blocks_of(state_elements(in.shape) / pack, kScanThreads), kScanThreads, in.shape,
              device_in(in.starts), device_in(sums), device_in(added), device_in(from_last),
              device_out(gradients), device_out(initial));
}

void launch_ends(const ScanTensors& in, const at::Tensor& sums, const at::Tensor& states,
                 const at::Tensor& gradients, const at::Tensor& ends) {
  const std::int64_t pack = cuda_pack(in.shape.head_width, most_of(in), {states, gradients});
  device_kernel("penstock_scan_ends", kEnds, in, pack)
      .launch(device_of(in), static_cast<unsigned>(ends.numel()), kScanThreads, in.shape,
              device_in(in.starts), device_in(sums), device_in(states), device_in(gradients),
              device_out(ends));
}

void launch_join_backward(const ScanTensors& in, const at::Tensor& sums, const JoinedGradients& joined) {
  const std::int64_t pack =
      cuda_pack(in.shape.head_width, most_of(in),
                {in.values, joined.gradient, joined.inside, joined.passed, joined.read, joined.values});
  device_kernel("penstock_scan_join_backward", kJoinBackward, in, pack)
      .launch(device_of(in), blocks_of(tokens_and_heads(in.shape) * kTeam, kScanThreads), kScanThreads,
              in.shape, device_in(in.starts), device_in(sums), device_in(in.values), device_in(in.steps),
              device_in(in.skip), device_in(joined.gradient), device_in(joined.inside),
              device_in(joined.passed), device_in(joined.read), device_out(joined.values),
              device_out(joined.row_sums), device_in(joined.own_weights), device_out(joined.input_sums),
              device_out(joined.state_sums), device_out(joined.skip_sums));
}

void launch_steps_backward(const ScanTensors& in, const JoinedGradients& joined, const at::Tensor& ends,
                           const at::Tensor& steps, const at::Tensor& decay) {
  device_kernel("penstock_scan_steps_backward", kStepsBackward, in, 1)
      .launch(device_of(in), blocks_of(tokens_and_heads(in.shape), kScanThreads), kScanThreads, in.shape,
              device_in(in.starts), device_in(joined.row_sums), device_in(joined.input_sums),
              device_in(joined.state_sums), device_in(ends), device_in(in.steps), device_in(in.decay),
              device_out(steps), device_out(decay));
}

void scan_step_on_cuda(const ScanTensors& in, const at::Tensor& state, const at::Tensor& result) {
  const ScanShape& s = in.shape;
  device_kernel("penstock_scan_step", kStep, in, 1, (s.state_size + kScanWarp - 1) / kScanWarp)
      .launch(device_of(in), blocks_of(s.batch * s.inner() * kScanWarp, kScanThreads), kScanThreads, s,
              device_in(in.values), device_in(in.steps), device_in(in.decay), device_in(in.keys),
              device_in(in.queries), device_in(in.skip), device_out(state), device_out(result));
}

}  // namespace penstock::detail
