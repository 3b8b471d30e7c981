// Reference data of the section `dtensor`: redistributions, forward and backward, on worlds of threads.
// Values and shapes are exact; strides are not compared, because a local part here is always dense, while
// PyTorch 2.14 keeps the padding it received with.
#include <fmt/format.h>
#include <torch/torch.h>

#include <functional>
#include <mutex>

#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "tests/golden_data.h"

namespace penstock {
namespace golden_dtensor_test {

using namespace std::chrono_literals;
using nlohmann::json;
using Numbers = std::vector<std::int64_t>;

// "S0", "R", "P", "Pavg", "Pmax".
Placement placement_of(const std::string& text) {
  if (text == "R") return Replicate{};
  if (text == "P") return Partial{};
  if (text.starts_with("P")) return parse_placement("P(" + text.substr(1) + ")");
  if (text.starts_with("S")) return Shard{std::stoll(text.substr(1))};
  throw std::runtime_error("unknown placement: " + text);
}

Placements placements_of_json(const json& list) {
  Placements placements;
  for (const json& item : list) placements.push_back(placement_of(item.get<std::string>()));
  return placements;
}

at::Tensor tensor_of(const json& part) {
  return at::tensor(part.at("values").get<std::vector<float>>(), at::kFloat)
      .view(part.at("shape").get<Numbers>());
}

// Shape and ranks of a mesh that is given as nested lists.
struct MeshText {
  Numbers shape;
  std::vector<int> ranks;
  explicit MeshText(const json& list) {
    for (const json* level = &list; level->is_array(); level = &level->at(0))
      shape.push_back(static_cast<std::int64_t>(level->size()));
    const std::function<void(const json&)> collect = [&](const json& item) {
      if (item.is_array())
        for (const json& inner : item) collect(inner);
      else
        ranks.push_back(item.get<int>());
    };
    collect(list);
  }
};

// Runs cases of one mesh on one world: creating worlds takes longer than the cases.
void run_by_mesh(const std::string& kind,
                 const std::function<void(const json&, const comm::MeshGroups&, int)>& body) {
  std::map<std::string, std::vector<json>> by_mesh;
  std::size_t run = 0;
  for (const auto& [id, item] : test::golden_cases("dtensor", kind))
    by_mesh[item.at("mesh").dump()].push_back(item);
  for (const auto& [text, cases] : by_mesh) {
    const MeshText shape(json::parse(text));
    comm::run_ranks(static_cast<int>(shape.ranks.size()), 120s, [&](comm::World& world) {
      const comm::MeshGroups mesh(world, DeviceMesh("cpu", shape.shape, shape.ranks, {}, world.rank()));
      for (const json& item : cases) body(item, mesh, world.rank());
    });
    run += cases.size();
  }
  std::cout << run << " cases of " << kind << "\n";
}

std::mutex report;

#define EXPECT_HERE(condition, id, rank, what)                \
  if (!(condition)) {                                         \
    const std::lock_guard lock(report);                       \
    ADD_FAILURE() << id << ", rank " << rank << ": " << what; \
  }

TEST(GoldenDTensor, Redistribute) {
  run_by_mesh("redistribute", [](const json& item, const comm::MeshGroups& mesh, int rank) {
    const std::string id = item.at("id");
    const auto at = static_cast<std::size_t>(rank);
    const Placements to = placements_of_json(item.at("dst"));
    const at::Tensor x =
        from_local(tensor_of(item.at("before").at(at)), mesh, placements_of_json(item.at("src")),
                   {.shape = item.at("global_shape").get<Numbers>(), .stride = {}, .check = false});
    if (item.contains("error_type")) {
      try {
        redistribute(x, to);
        EXPECT_HERE(false, id, rank, "expected an error");
      } catch (const ValueError&) {
      }
      return;
    }
    const at::Tensor y = redistribute(x, to);
    const at::Tensor expected = tensor_of(item.at("after").at(at)), local = to_local(y);
    EXPECT_HERE(local.sizes() == expected.sizes() && at::equal(local, expected), id, rank,
                "got " << local << "\nexpected " << expected);
    EXPECT_HERE(local.is_contiguous(), id, rank, "the local part is not dense");
    const auto& after = item.at("after_placements");
    for (std::size_t axis = 0; axis < after.size(); ++axis)
      EXPECT_HERE(placements_of(y)[axis] == parse_placement(after[axis].get<std::string>()), id, rank,
                  to_string(placements_of(y)));
  });
}

TEST(GoldenDTensor, RedistributeGradients) {
  run_by_mesh("redistribute_grad", [](const json& item, const comm::MeshGroups& mesh, int rank) {
    const std::string id = item.at("id");
    const Numbers shape = item.at("global_shape").get<Numbers>();
    const Placements from = placements_of_json(item.at("src"));
    Placements parts = from;
    for (Placement& placement : parts)
      if (placement.is_partial()) placement = Replicate{};
    const at::Tensor value = to_local(distribute_tensor(at::ones(shape), mesh, parts));
    at::Tensor x = from_local(value, mesh, from, {.shape = shape, .stride = {}, .check = false})
                       .detach()
                       .requires_grad_();
    (to_local(redistribute(x, placements_of_json(item.at("dst")))).sum() * (rank + 1)).backward();
    const at::Tensor expected = tensor_of(item.at("local_grads").at(static_cast<std::size_t>(rank))),
                     got = to_local(x.grad());
    EXPECT_HERE(got.sizes() == expected.sizes() && at::equal(got, expected), id, rank,
                "got " << got << "\nexpected " << expected);
  });
}

}  // namespace golden_dtensor_test
}  // namespace penstock
