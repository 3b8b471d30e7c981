// The memory of a plan: what is made in it stays at its place until the plan is destroyed.
//
// A plan consists of many small lists and constants; making each of them separately would take most of the
// time of planning. Private to this folder. Thread safety: one thread at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <memory_resource>
#include <new>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace penstock::graph {

class PlanMemory {
 public:
  PlanMemory() = default;
  ~PlanMemory() {
    for (const Made& made : made_) made.destroy(made.object);
  }
  PlanMemory(const PlanMemory&) = delete;
  PlanMemory& operator=(const PlanMemory&) = delete;

  template <class T, class... Arguments>
  T* make(Arguments&&... arguments) {
    T* object = new (blocks_.allocate(sizeof(T), alignof(T))) T(std::forward<Arguments>(arguments)...);
    if constexpr (!std::is_trivially_destructible_v<T>)
      made_.push_back({object, [](void* made) { static_cast<T*>(made)->~T(); }});
    return object;
  }
  // `count` default values.
  template <class T>
  requires(std::is_trivially_destructible_v<T>) std::span<T> list(std::size_t count) {
    if (count == 0) return {};
    T* first = static_cast<T*>(blocks_.allocate(count * sizeof(T), alignof(T)));
    std::uninitialized_value_construct_n(first, count);
    return {first, count};
  }
  template <class T>
  std::span<T> copy(std::span<const T> from) {
    const std::span<T> to = list<T>(from.size());
    std::copy(from.begin(), from.end(), to.begin());
    return to;
  }

 private:
  struct Made {
    void* object;
    void (*destroy)(void*);
  };
  std::pmr::monotonic_buffer_resource blocks_{4096};
  std::vector<Made> made_;  // those with a destructor
};

}  // namespace penstock::graph
