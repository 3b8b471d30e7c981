#include "penstock/dtensor/tensor/dtensor_random.h"

#include <ATen/CPUGeneratorImpl.h>

#include <bit>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <unordered_map>

#include "penstock/errors.h"
#include "penstock/mode.h"
#include "penstock/step_context.h"

namespace penstock {
namespace {

// The step and microbatch that operators are counted in; std::nullopt outside of a step.
using Scope = std::optional<std::tuple<std::uint64_t, std::int64_t, std::int64_t, bool>>;

Scope current_scope() {
  const auto context = StepContext::current();
  if (!context->running) return std::nullopt;
  return std::tuple(context->seed, context->step, context->microbatch.value_or(-1), context->trial);
}

bool same_step(const Scope& a, const Scope& b) {
  return a.has_value() == b.has_value() &&
         (!a || (std::get<0>(*a) == std::get<0>(*b) && std::get<1>(*a) == std::get<1>(*b)));
}

struct MeshRandom {
  std::optional<std::uint64_t> given;   // by manual_seed
  std::optional<std::uint64_t> agreed;  // otherwise
  std::map<Scope, std::uint64_t> counts;

  std::uint64_t& count(const Scope& scope) {
    // Counters of earlier steps are not needed any more.
    if (scope && !counts.count(scope))
      std::erase_if(counts, [&](const auto& entry) { return entry.first && !same_step(entry.first, scope); });
    return counts[scope];
  }
};

// By mesh number, so that nothing here keeps a World alive. Never freed: tensors may outlive every static
// object.
struct Table {
  std::mutex mutex;
  std::unordered_map<std::uint64_t, MeshRandom> meshes;

  static Table& instance() {
    static Table& table = *new Table;
    return table;
  }
};

std::uint64_t generator_seed() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return generator.current_seed();
}

// Broadcasts the value of the mesh's first rank to all its ranks: axis by axis from position 0.
std::uint64_t agree(const comm::MeshGroups& mesh, const at::Tensor& like) {
  const at::Tensor seed =
      at::full({1}, std::bit_cast<std::int64_t>(generator_seed()), at::TensorOptions(at::kLong))
          .to(like.device());
  for (std::size_t axis = 0; axis < mesh.shape().size(); ++axis) {
    if (mesh.shape()[axis] == 1) continue;
    const comm::Group group = mesh.group(static_cast<int>(axis));
    group.broadcast(seed, group.rank_at(0), {.label = "seed of random operators"}).wait();
  }
  return std::bit_cast<std::uint64_t>(seed.item<std::int64_t>());
}

}  // namespace

void manual_seed(const comm::MeshGroups& mesh, std::uint64_t seed) {
  Table& table = Table::instance();
  const std::lock_guard lock(table.mutex);
  MeshRandom& random = table.meshes[mesh.id()];
  random.given = seed;
  random.counts.clear();
}

RandomCursor random_cursor(const comm::MeshGroups& mesh) {
  const Scope scope = current_scope();
  Table& table = Table::instance();
  const std::lock_guard lock(table.mutex);
  return {table.meshes[mesh.id()].count(scope)};
}

RandomReplay::RandomReplay(const comm::MeshGroups& mesh, const RandomCursor& start)
    : mesh_id_(mesh.id()), before_(random_cursor(mesh)) {
  const Scope scope = current_scope();
  Table& table = Table::instance();
  const std::lock_guard lock(table.mutex);
  table.meshes[mesh_id_].count(scope) = start.count;
}

RandomReplay::~RandomReplay() {
  const Scope scope = current_scope();
  Table& table = Table::instance();
  const std::lock_guard lock(table.mutex);
  table.meshes[mesh_id_].count(scope) = before_.count;
}

namespace detail {

RandomKey next_random_key(const comm::MeshGroups& mesh, const at::Tensor& like, std::int64_t purpose) {
  if (is_recording())
    throw NotImplemented(
        "random operators on distributed tensors draw different numbers on every call, based on a counter "
        "that a captured graph would not advance; leave them "
        "out of the captured function, or set dropout to 0");
  const auto context = StepContext::current();
  const Scope scope = current_scope();
  Table& table = Table::instance();
  std::unique_lock lock(table.mutex);
  // References into the table stay valid while it grows; entries are never removed.
  MeshRandom& random = table.meshes[mesh.id()];
  if (!scope && !random.given && !random.agreed) {
    // Only one thread starts collectives on a group, so no other thread can be here for this mesh.
    lock.unlock();
    const std::uint64_t seed = agree(mesh, like);
    lock.lock();
    random.agreed = seed;
  }
  const auto count = static_cast<std::int64_t>(random.count(scope)++);
  if (!scope)
    return {.seed = random.given.value_or(random.agreed.value_or(0)), .layer = count, .purpose = purpose};
  RandomKey key = context->key(count, purpose);
  // Streams of meshes with different numbers are far apart.
  if (random.given)
    key.layer ^= std::bit_cast<std::int64_t>((*random.given + 1) * 0x9e3779b97f4a7c15ull) << 20;
  return key;
}

}  // namespace detail
}  // namespace penstock
