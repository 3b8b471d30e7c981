// Checkpoints of tensors: written by the background thread under one layout, loaded under another.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <set>

#include "penstock/checkpoint/tensors/load.h"
#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/checkpoint/tensors/writer.h"
#include "penstock/checkpoint_types.h"
#include "penstock/comm/launch/launch_env.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/world.h"
#include "tests/checkpoint/file_ranks.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::checkpoint {
namespace checkpoint_test {

using namespace std::chrono_literals;
using penstock::test::has_text;
using penstock::test::message_of;
using test::contents_of;
using test::Numbers;
using test::TemporaryFolder;

at::Tensor values(const Numbers& shape, int seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(seed));
  return at::randn(shape, generator);
}

struct Named {
  std::string name;
  at::Tensor whole;
};

std::vector<Named> model() {
  return {{"embed.weight", values({11, 6}, 1)},
          {"blocks.0.attention.query.weight", values({8, 6}, 2)},
          {"blocks.0.feed.down.weight", values({6, 9}, 3).to(at::kBFloat16)},
          {"norm.weight", values({6}, 4)},
          {"scalar", values({}, 5).to(at::kDouble)}};
}

// Puts every tensor that has dims in these placements; the others stay plain.
std::vector<TensorPart> spread(const std::vector<Named>& tensors, const comm::MeshGroups& mesh,
                               const Placements& placements) {
  std::vector<TensorPart> parts;
  for (const Named& tensor : tensors) {
    const bool fits = std::all_of(placements.begin(), placements.end(), [&](const Placement& p) {
      return !p.splits() || p.dim() < tensor.whole.dim();
    });
    parts.push_back(tensor_part(tensor.name, fits && tensor.whole.dim() > 0
                                                 ? distribute_tensor(tensor.whole, mesh, placements,
                                                                     {.source_axis_rank = std::nullopt})
                                                 : tensor.whole));
  }
  return parts;
}

void on_mesh(const Numbers& shape, const std::function<void(comm::World&, const comm::MeshGroups&)>& body) {
  const int size = test::ranks_of(shape);
  comm::run_ranks(size, 120s, [&](comm::World& world) {
    body(world, {world, init_device_mesh("cpu", shape, {}, world.rank(), size)});
  });
}

std::vector<Named> zeros_like(const std::vector<Named>& tensors) {
  std::vector<Named> zeros;
  for (const Named& tensor : tensors) zeros.push_back({tensor.name, at::zeros_like(tensor.whole)});
  return zeros;
}

TEST(Checkpoint, AnyLayoutWritesTheSameAndLoadsIntoAnyOther) {
  const TemporaryFolder folder;
  struct Case {
    Numbers mesh;
    Placements placements;
  };
  const std::vector<Case> cases{{{1}, {Replicate{}}}, {{2, 2}, {Shard{0}, Shard{1}}},
                                {{4}, {Shard{0}}},    {{2, 2}, {StridedShard{0, 2}, Shard{0}}},
                                {{3}, {Shard{1}}},    {{2, 2}, {Replicate{}, StridedShard{0, 3}}}};
  std::map<std::string, std::string> first;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const auto place = folder.path() / std::to_string(i);
    on_mesh(cases[i].mesh, [&](comm::World& world, const comm::MeshGroups& mesh) {
      CheckpointWriter writer(world, place);
      const auto tensors = model();
      writer.save(120, {spread(tensors, mesh, cases[i].placements),
                        spread({{"m", values({11, 6}, 9)}}, mesh, cases[i].placements), R"({"data": 7})"});
      writer.wait();
    });
    const auto contents = contents_of(place / "step-00000120");
    if (i == 0) first = contents;
    EXPECT_EQ(contents, first) << "case " << i;
  }
  for (const Case& target : cases)
    on_mesh(target.mesh, [&](comm::World& world, const comm::MeshGroups& mesh) {
      WorldAgreement agreement(world);
      const auto opened = open_latest(agreement, folder.path() / "1");
      ASSERT_TRUE(opened);
      EXPECT_EQ(opened->checkpoint.state_json(), R"({"data": 7})");
      const auto expected = spread(model(), mesh, target.placements);
      const auto parts = spread(zeros_like(model()), mesh, target.placements);
      load_into(agreement, opened->checkpoint, Section::Model, parts);
      for (std::size_t i = 0; i < parts.size(); ++i)
        EXPECT_TRUE(at::equal(parts[i].local, expected[i].local))
            << parts[i].name << " on rank " << world.rank();
    });
}

// Pipeline stages hold different names; two replicas of each stage hold the same ones.
TEST(Checkpoint, StagesAndReplicas) {
  const TemporaryFolder folder;
  const auto stage_of = [](const Named& tensor) { return tensor.name < "f" ? 0 : 1; };
  comm::run_ranks(4, 120s, [&](comm::World& world) {  // pp 2 x dp 2
    std::vector<TensorPart> parts;
    for (const Named& tensor : model())
      if (stage_of(tensor) == world.rank() / 2)
        parts.push_back(tensor_part(tensor.name, tensor.whole.clone()));
    CheckpointWriter writer(world, folder.path());
    writer.save(1, {.model = parts});
    writer.wait();
  });
  comm::run_ranks(2, 120s, [&](comm::World& world) {  // the other way round
    WorldAgreement agreement(world);
    const auto opened = open_latest(agreement, folder.path());
    std::vector<TensorPart> parts;
    for (const Named& tensor : zeros_like(model()))
      if (stage_of(tensor) != world.rank()) parts.push_back(tensor_part(tensor.name, tensor.whole));
    load_into(agreement, opened->checkpoint, Section::Model, parts);
    for (const Named& tensor : model())
      for (const TensorPart& part : parts)
        if (part.name == tensor.name) {
          EXPECT_TRUE(at::equal(part.local, tensor.whole)) << part.name;
        }
  });
}

TEST(Checkpoint, EveryElementTypeAndMemoryLayout) {
  const TemporaryFolder folder;
  const auto world = comm::World::connect({});
  WorldAgreement agreement(world);
  std::vector<TensorPart> parts;
  const at::Tensor base = at::arange(24, at::kFloat).reshape({4, 6}) - 7;
  for (const auto type : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kFloat,
                          at::kDouble, at::kBool, at::kBFloat16, at::kComplexFloat})
    parts.push_back(tensor_part(c10::toString(type), base.to(type).t()));  // not contiguous
  EXPECT_TRUE(
      has_text(message_of<ValueError>([&] { tensor_part("c", base.to(at::kComplexDouble)); }), "complex128"));
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { tensor_part("u", at::Tensor()); }), "undefined"));
  EXPECT_THROW(tensor_part("m", at::empty({2}, at::device(at::kMeta))), ValueError);
  CheckpointWriter writer(world, folder.path());
  writer.save(0, {.model = parts});
  writer.wait();
  const auto opened = open_latest(agreement, folder.path());
  for (const TensorPart& part : parts) {
    at::Tensor plain = at::zeros(part.local.sizes(), part.local.options());
    at::Tensor strided = at::zeros({6, 8}, part.local.options()).slice(1, 0, 8, 2);
    load_into(agreement, opened->checkpoint, Section::Model, {tensor_part(part.name, plain)},
              {.allow_extra = true});
    load_into(agreement, opened->checkpoint, Section::Model, {tensor_part(part.name, strided)},
              {.allow_extra = true});
    EXPECT_TRUE(at::equal(plain, part.local)) << part.name;
    EXPECT_TRUE(at::equal(strided, part.local)) << part.name;
  }
}

TEST(Checkpoint, AParameterIsLoadedInPlace) {
  const TemporaryFolder folder;
  const auto world = comm::World::connect({});
  WorldAgreement agreement(world);
  torch::nn::Linear saved(4, 3), loaded(4, 3);
  const auto parts = [](torch::nn::Linear& module) {
    std::vector<TensorPart> all;
    for (const auto& parameter : module->named_parameters())
      all.push_back(tensor_part(parameter.key(), parameter.value()));
    return all;
  };
  CheckpointWriter writer(world, folder.path());
  writer.save(0, {.model = parts(saved)});
  writer.wait();
  load_into(agreement, open_latest(agreement, folder.path())->checkpoint, Section::Model, parts(loaded));
  EXPECT_TRUE(at::equal(loaded->weight, saved->weight));
  EXPECT_TRUE(loaded->weight.requires_grad() && loaded->weight.is_leaf());
}

TEST(Load, MismatchesAreListedOnEveryRank) {
  const TemporaryFolder folder;
  std::mutex mutex;
  std::set<std::string> errors;
  comm::run_ranks(2, 120s, [&](comm::World& world) {
    WorldAgreement agreement(world);
    CheckpointWriter writer(world, folder.path());
    writer.save(5,
                {.model = {tensor_part("same", at::ones({2})), tensor_part("shape", at::ones({2})),
                           tensor_part("dtype", at::full({2}, 2.5)), tensor_part("weihgt", at::ones({1}))}});
    writer.wait();
    const auto opened = open_latest(agreement, folder.path());
    std::vector<TensorPart> parts{tensor_part("same", at::zeros({2}))};
    if (world.rank() == 0) parts.push_back(tensor_part("shape", at::zeros({3})));
    if (world.rank() == 1) {
      parts.push_back(tensor_part("dtype", at::zeros({2}, at::kBFloat16)));
      parts.push_back(tensor_part("weight", at::zeros({1})));
    }
    const std::string error =
        message_of<CheckpointError>([&] { load_into(agreement, opened->checkpoint, Section::Model, parts); });
    EXPECT_EQ(parts[0].local.sum().item<double>(), 0) << "nothing was loaded";
    if (world.rank() == 0) parts.pop_back();
    const LoadReport report = load_into(agreement, opened->checkpoint, Section::Model, parts,
                                        {.allow_cast = true, .allow_missing = true, .allow_extra = true});
    EXPECT_EQ(report.missing, std::vector<std::string>{"weight"});
    EXPECT_EQ(report.extra, (std::vector<std::string>{"shape", "weihgt"}));
    EXPECT_EQ(report.cast, std::vector<std::string>{"dtype: F32 in the checkpoint, BF16 here"});
    EXPECT_EQ(parts[0].local.sum().item<double>(), 2);
    if (world.rank() == 1) {
      EXPECT_EQ(parts[1].local.sum().item<double>(), 5);
    }
    std::lock_guard lock(mutex);
    errors.insert(error);
  });
  ASSERT_EQ(errors.size(), 1u);
  for (const char* part :
       {"shape: F32[2] in the checkpoint, F32[3] here",
        "dtype: F32 in the checkpoint, BF16 here (conversion is not allowed)",
        "weight: not in the checkpoint; it has weihgt", "weihgt: in the checkpoint, but no rank has it"})
    EXPECT_TRUE(has_text(*errors.begin(), part));
}

TEST(TensorPart, PartialPlacementsAreRefused) {
  on_mesh({2}, [](comm::World&, const comm::MeshGroups& mesh) {
    EXPECT_TRUE(has_text(
        message_of<ValueError>([&] { tensor_part("grad", from_local(at::ones({2}), mesh, {Partial{}})); }),
        "redistribute it first"));
  });
}

// The values are those at the time of the call, however long writing takes.
TEST(CheckpointWriter, ReturnsBeforeItIsWritten) {
  const TemporaryFolder folder;
  std::mutex mutex;
  std::condition_variable changed;
  bool go = false;
  comm::run_ranks(2, 120s, [&](comm::World& world) {
    WriterOptions options;
    options.files.at_phase = [&](WritePhase phase, int) {
      std::unique_lock lock(mutex);
      if (phase == WritePhase::FolderMade) changed.wait_for(lock, 60s, [&] { return go; });
    };
    CheckpointWriter writer(world, folder.path(), options);
    at::Tensor weight = at::full({3}, 1.0);
    writer.save(1, {.model = {tensor_part("w", weight)}});
    weight.fill_(2.0);  // training and its communication continue
    world.group().all_reduce(weight).wait();
    EXPECT_TRUE(find_checkpoints(folder.path()).empty());
    world.group().barrier().wait();
    {
      std::lock_guard lock(mutex);
      go = true;
    }
    changed.notify_all();
    writer.save(2, {.model = {tensor_part("w", weight)}});
    writer.wait();
    WorldAgreement agreement(world);
    for (const std::int64_t step : {1, 2}) {
      at::Tensor read = at::zeros({3});
      load_into(agreement, open_checkpoint(agreement, folder.path() / step_folder_name(step)), Section::Model,
                {tensor_part("w", read)});
      EXPECT_EQ(read.sum().item<double>(), step == 1 ? 3 : 12);
    }
  });
}

TEST(CheckpointWriter, AnErrorComesUpAtTheNextCallOnEveryRank) {
  const TemporaryFolder folder;
  std::mutex mutex;
  std::set<std::string> errors;
  comm::run_ranks(3, 120s, [&](comm::World& world) {
    WriterOptions options;
    options.files.fault = [&](const std::filesystem::path& path, std::uint64_t offset, std::uint64_t) {
      return path.parent_path().filename() == ".step-00000002.writing" &&
                     path.filename() == "model.safetensors" && offset > 0 && world.rank() == 1
                 ? ENOSPC
                 : 0;
    };
    CheckpointWriter writer(world, folder.path(), options);
    const auto contents = [&] {
      return CheckpointContents{.model = {tensor_part("w" + std::to_string(world.rank()), at::ones({100}))}};
    };
    writer.save(1, contents());
    writer.save(2, contents());
    const std::string error = message_of<CheckpointError>(
        [&] { world.rank() == 2 ? writer.wait() : void(writer.save(3, contents())); });
    {
      std::lock_guard lock(mutex);
      errors.insert(error);
    }
    world.group().barrier().wait();
    EXPECT_EQ(find_checkpoints(folder.path()).size(), 1u) << "the last good one, and nothing of step 3";
    writer.save(4, contents());  // it can be used again
    writer.wait();
    WorldAgreement agreement(world);
    EXPECT_EQ(open_latest(agreement, folder.path())->checkpoint.step(), 4);
  });
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_TRUE(has_text(*errors.begin(), "checkpoint of step 2 was not saved: rank 1: cannot write bytes"));
  EXPECT_TRUE(has_text(*errors.begin(), "No space left on device"));
}

TEST(CheckpointWriter, BadPartsAreAnErrorOfTheCallItself) {
  const TemporaryFolder folder;
  comm::run_ranks(2, 120s, [&](comm::World& world) {
    CheckpointWriter writer(world, folder.path());
    const auto differ = [&] { writer.save(1, {.model = {tensor_part("w", at::ones({2 + world.rank()}))}}); };
    EXPECT_TRUE(has_text(message_of<CheckpointError>(differ), "w: F32[2] on rank 0, but F32[3] on rank 1"));
    EXPECT_TRUE(
        has_text(message_of<CheckpointError>([&] { writer.save(-1, {}); }), "checkpoint step: got -1"));
    TensorPart wrong = tensor_part("w", at::ones({2}));
    if (world.rank() == 1) wrong.local = at::ones({3});
    EXPECT_TRUE(has_text(message_of<CheckpointError>([&] { writer.save(1, {.model = {wrong}}); }),
                         "rank 1: part of a checkpoint: w"));
    writer.wait();
    writer.save(1, {});
    writer.wait();
  });
  EXPECT_EQ(find_checkpoints(folder.path()).size(), 1u);
}

TEST(CheckpointWriter, ADeadlineThatPassesDisturbsNothingElse) {
  const TemporaryFolder folder;
  comm::run_ranks(2, 120s, [&](comm::World& world) {
    WriterOptions options;
    options.timeout = 300ms;
    options.files.at_phase = [&](WritePhase phase, int rank) {
      if (phase == WritePhase::PartsWritten && rank == 1) std::this_thread::sleep_for(1500ms);
    };
    CheckpointWriter writer(world, folder.path(), options);
    writer.save(1, {.model = {tensor_part("w" + std::to_string(world.rank()), at::ones({4}))}});
    EXPECT_TRUE(has_text(message_of<CheckpointError>([&] { writer.wait(); }), "rank 1 did not join"));
    at::Tensor sum = at::ones({1});
    world.group().all_reduce(sum).wait();
    EXPECT_EQ(sum.item<double>(), 2);
  });
  EXPECT_TRUE(find_checkpoints(folder.path()).empty());
}

TEST(CheckpointWriter, CleansUpAtTheStartAndExcludesASecondWriter) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder.path() / ".step-00000009.writing");
  comm::run_ranks(2, 120s, [&](comm::World& world) {
    CheckpointWriter writer(world, folder.path());
    EXPECT_FALSE(std::filesystem::exists(folder.path() / ".step-00000009.writing"));
    EXPECT_TRUE(has_text(message_of<CheckpointError>([&] { CheckpointWriter second(world, folder.path()); }),
                         "another run is writing"));
  });
}

TEST(CheckpointWriter, AbandonsTheSaveWhenDestroyed) {
  const TemporaryFolder folder;
  comm::run_ranks(2, 120s, [&](comm::World& world) {
    WriterOptions options;
    options.files.at_phase = [&](WritePhase phase, int) {
      if (phase == WritePhase::FolderMade) std::this_thread::sleep_for(200ms);
    };
    {
      CheckpointWriter writer(world, folder.path(), options);
      writer.save(1, {.model = {tensor_part("w", at::ones({4}))}});
    }
    world.group().barrier().wait();
    EXPECT_TRUE(find_checkpoints(folder.path()).empty());
  });
}

}  // namespace checkpoint_test
}  // namespace penstock::checkpoint
