// Checkpoints as files: every layout writes the same bytes, any layout can read them, and damage anywhere is
// found and named.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <random>
#include <set>
#ifdef PENSTOCK_HAVE_RAPIDCHECK
#include <rapidcheck/gtest.h>

#include "tests/mesh/generate.h"
#endif

#include "penstock/checkpoint/files/blocks.h"
#include "penstock/checkpoint_types.h"
#include "penstock/errors.h"
#include "tests/checkpoint/file_ranks.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::checkpoint {
namespace checkpoint_files_test {

using namespace std::chrono_literals;
using namespace test;
using penstock::test::has_text;
using penstock::test::message_of;

// Layouts of the sample tensors ([6,10], [7,3,4], [10], scalar, empty [0,4], [6,10], [1]).
std::vector<Spread> layouts() {
  const Replicate r{};
  const auto s = [](std::int64_t dim) { return Shard{dim}; };
  return {
      alone(),
      {{4}, {{s(0)}, {s(0)}, {s(0)}, {r}, {s(0)}, {s(1)}, {s(0)}}},
      {{3}, {{s(1)}, {s(2)}, {r}, {r}, {s(1)}, {s(0)}, {r}}},
      {{2, 2}, {{s(0), s(1)}, {s(0), s(0)}, {r, s(0)}, {r, r}, {r, s(0)}, {s(1), s(0)}, {r, s(0)}}},
      {{2, 2},
       {{StridedShard{0, 2}, s(0)},
        {StridedShard{0, 2}, s(0)},
        {s(0), r},
        {r, r},
        {r, r},
        {StridedShard{1, 2}, s(1)},
        {s(0), r}}},
      {{2, 3},
       {{StridedShard{1, 4}, s(0)}, {s(1), s(2)}, {s(0), s(0)}, {r, r}, {s(0), s(1)}, {r, r}, {r, s(0)}}},
      {{5}, {{s(0)}, {s(1)}, {s(0)}, {r}, {s(1)}, {StridedShard{1, 3}}, {s(0)}}},
  };
}

void expect_no_errors(const std::vector<std::string>& errors) {
  for (std::size_t rank = 0; rank < errors.size(); ++rank) EXPECT_EQ(errors[rank], "") << "rank " << rank;
}

void expect_same_error(const std::vector<std::string>& errors, const std::string& part) {
  for (const std::string& error : errors) {
    EXPECT_TRUE(has_text(error, part));
    EXPECT_EQ(error, errors.front());
  }
}

TEST(Slice, RunsAreMaximal) {
  const auto runs = [](const Slice& slice) {
    std::vector<std::array<std::uint64_t, 3>> all;
    for_each_run(slice, 4, [&](ByteRun run) { all.push_back({run.global, run.local, run.bytes}); });
    return all;
  };
  using Runs = std::vector<std::array<std::uint64_t, 3>>;
  EXPECT_EQ(runs(Slice::whole({2, 3, 4})), (Runs{{0, 0, 96}}));
  EXPECT_EQ(runs(Slice::whole({})), (Runs{{0, 0, 4}}));
  EXPECT_EQ(runs(Slice::whole({2, 0})), Runs{});
  EXPECT_EQ(runs({{4, 6}, {2, 6}, local_boxes({4, 6}, {2}, {1}, {Shard{0}})}), (Runs{{48, 0, 48}}));
  EXPECT_EQ(runs({{2, 6}, {2, 3}, local_boxes({2, 6}, {2}, {1}, {Shard{1}})}),
            (Runs{{12, 0, 12}, {36, 12, 12}}));
}

TEST(Slice, InvalidSlicesAreDetected) {
  EXPECT_EQ(validation_error(Slice::whole({2, 3})), "");
  EXPECT_EQ(validation_error({{2, 3}, {0}, {}}), "");
  EXPECT_NE(validation_error({{2}, {2}, {{{1}, {2}, {0}}}}), "");
  EXPECT_NE(validation_error({{4}, {2}, {{{0}, {3}, {0}}}}), "");
  EXPECT_NE(validation_error({{4}, {3}, {{{0}, {2}, {0}}}}), "");
  EXPECT_NE(validation_error({{4}, {4}, {{{0}, {2}, {0}}, {{1}, {2}, {2}}}}), "");
  EXPECT_NE(validation_error({{4}, {2, 2}, {{{0}, {4}, {0}}}}), "");
}

TEST(CheckpointFiles, EveryLayoutWritesTheSameBytesAndReadsThemAll) {
  const TemporaryFolder folder;
  std::map<std::string, std::string> first;
  const auto all = layouts();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto place = folder.path() / std::to_string(i);
    expect_no_errors(errors_on_ranks(ranks_of(all[i].mesh),
                                     [&](RankAgreement& agreement) { save(agreement, place, 120, all[i]); }));
    const auto contents = contents_of(place / "step-00000120");
    EXPECT_EQ(contents.size(), 4u);
    if (i == 0) first = contents;
    EXPECT_EQ(contents, first) << "layout " << i;
    EXPECT_EQ(contents_of(place).size(), 1u) << "nothing else is left behind";
  }
  // Written with one layout, read with all others.
  for (const Spread& spread : all)
    expect_no_errors(errors_on_ranks(ranks_of(spread.mesh), [&](RankAgreement& agreement) {
      const auto opened = open_latest(agreement, folder.path() / "3");
      EXPECT_TRUE(opened && opened->skipped.empty());
      EXPECT_EQ(opened->checkpoint.state_json(), R"({"step": 120})");
      const OwnedParts own = parts_of(spread, agreement.rank());
      for (std::size_t i = 0; i < own.parts.size(); ++i) {
        std::vector<std::uint8_t> bytes(own.memory[i].size());
        opened->checkpoint.read(own.parts[i].tensor.section, own.parts[i].tensor.name,
                                own.parts[i].tensor.slice, bytes);
        EXPECT_EQ(bytes, own.memory[i]) << own.parts[i].tensor.name << " on rank " << agreement.rank();
      }
    }));
}

#ifdef PENSTOCK_HAVE_RAPIDCHECK
RC_GTEST_PROP(Slice, RunsCutAndJoinAnyShards, ()) {
  using penstock::test::number;
  SampleTensor tensor{Section::Model, "t", Dtype::U16, {}};
  for (int dims = number(1, 3); dims > 0; --dims) tensor.shape.push_back(number<std::int64_t>(0, 7));
  const Numbers mesh = penstock::test::random_shape(2, 4);
  Placements placements;
  for (std::size_t axis = 0; axis < mesh.size(); ++axis) {
    const auto dim = number<std::int64_t>(0, static_cast<std::int64_t>(tensor.shape.size()) - 1);
    const int kind = number(0, 2);
    placements.push_back(kind == 0   ? Placement(Replicate{})
                         : kind == 1 ? Placement(Shard{dim})
                                     : Placement(StridedShard{dim, number<std::int64_t>(1, 4)}));
  }
  const auto whole = sample_bytes(tensor);
  std::vector<std::uint8_t> joined(whole.size(), 0);
  for (int rank = 0; rank < ranks_of(mesh); ++rank) {
    const Slice slice = slice_of(tensor, mesh, rank, placements);
    RC_ASSERT(validation_error(slice) == "");
    const auto part = cut_bytes(whole, slice, 2);
    std::vector<std::uint8_t> read(part.size(), 0);
    for_each_run(slice, 2, [&](ByteRun run) {
      std::copy_n(whole.begin() + static_cast<std::ptrdiff_t>(run.global), run.bytes,
                  read.begin() + static_cast<std::ptrdiff_t>(run.local));
      std::copy_n(part.begin() + static_cast<std::ptrdiff_t>(run.local), run.bytes,
                  joined.begin() + static_cast<std::ptrdiff_t>(run.global));
    });
    RC_ASSERT(read == part);
  }
  RC_ASSERT(joined == whole);
}
#endif

TEST(SavePlan, FilesAreCutByNamesAndSizesAlone) {
  std::vector<GlobalTensor> tensors;
  for (const char* name : {"d", "a", "c", "b"}) tensors.push_back({Section::Model, name, Dtype::F32, {10}});
  tensors.push_back({Section::Model, "bb", Dtype::U8, {500}});
  std::vector<std::string> names;
  for (const PlannedFile& file : plan_files(tensors, 100)) {
    std::string text = file.name + ":";
    for (const TensorEntry& entry : file.header.entries) text += " " + entry.name;
    names.push_back(text);
  }
  EXPECT_EQ(names, (std::vector<std::string>{
                       "model-00001-of-00003.safetensors: a b", "model-00002-of-00003.safetensors: bb",
                       "model-00003-of-00003.safetensors: c d", "optimizer.safetensors:"}));
}

TEST(SavePlan, SeveralFilesAreReadAsOne) {
  const TemporaryFolder folder;
  WriteOptions options = small_blocks();
  options.max_file_bytes = 250;
  expect_no_errors(errors_on_ranks(
      4, [&](RankAgreement& agreement) { save(agreement, folder.path(), 7, layouts()[3], options); }));
  EXPECT_TRUE(fs::exists(folder.path() / "step-00000007" / "model-00001-of-00002.safetensors"));
  SingleRankAgreement agreement;
  EXPECT_TRUE(is_sample(open_latest(agreement, folder.path())->checkpoint));
}

TEST(SavePlan, InconsistentPartsAreListed) {
  const auto tensor = [](const std::string& name, Numbers shape, std::vector<ShardBox> boxes, Numbers local,
                         Dtype dtype = Dtype::F32) {
    return AnnouncedTensor{
        Section::Model, name, dtype, {std::move(shape), std::move(local), std::move(boxes)}};
  };
  const auto whole = [](const std::string& name, const Numbers& shape, Dtype dtype = Dtype::F32) {
    return AnnouncedTensor{Section::Model, name, dtype, Slice::whole(shape)};
  };
  const std::string error = message_of<CheckpointError>([&] {
    make_save_plan(
        {{whole("shape", {2}), whole("dtype", {2}), tensor("half", {4}, {{{0}, {2}, {0}}}, {2}),
          tensor("cut", {4}, {{{0}, {3}, {0}}}, {3})},
         {whole("shape", {3}), whole("dtype", {2}, Dtype::F16), tensor("cut", {4}, {{{2}, {2}, {0}}}, {2})}});
  });
  for (const char* part :
       {"4 problems", "shape: F32[2] on rank 0, but F32[3] on rank 1", "dtype: F32[2] on rank 0, but F16[2]",
        "half: the ranks hold 2 of 4", "cut: ranks 0 and 1 hold parts that overlap"})
    EXPECT_TRUE(has_text(error, part));
  EXPECT_TRUE(has_text(message_of<CheckpointError>([&] {
                         make_save_plan({{whole("a", {1}), whole("a", {1})}});
                       }),
                       "a: occurs twice on rank 0"));
  // Replicas are written once, by the first rank that holds them.
  const SavePlan plan = make_save_plan({{}, {whole("a", {2})}, {whole("a", {2})}});
  EXPECT_EQ(plan.writes, (std::vector<std::vector<std::uint8_t>>{{}, {1}, {0}}));
}

TEST(SavePlan, AllRanksSaveTheSameStep) {
  const TemporaryFolder folder;
  expect_same_error(errors_on_ranks(2,
                                    [&](RankAgreement& agreement) {
                                      save(agreement, folder.path(), 5 + agreement.rank(), layouts()[0]);
                                    }),
                    "rank 0 saves step 5, but rank 1 saves step 6");
}

TEST(Index, AnyChangedBitIsDetected) {
  const Index index{
      120,
      256,
      {{"model.safetensors", "model", 300, {1, 0xffffffffffffffffu}}, {"state.json", "state", 2, {3}}}};
  const std::string text = to_text(index);
  EXPECT_EQ(parse_index(text, "index.json"), index);
  for (std::size_t at = 0; at < text.size(); ++at)
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = text;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << bit));
      EXPECT_THROW(parse_index(damaged, "index.json"), CheckpointError) << "byte " << at << " bit " << bit;
    }
  for (std::size_t length = 0; length < text.size(); ++length)
    EXPECT_THROW(parse_index(text.substr(0, length), "index.json"), CheckpointError) << length;
  EXPECT_THROW(parse_index(text + "\n", "index.json"), CheckpointError);
  std::string newer = text;
  newer.replace(newer.find("\"version\": 1"), 12, "\"version\": 2");
  EXPECT_TRUE(has_text(message_of<CheckpointError>([&] { parse_index(newer, "index.json"); }),
                       "format version 2, this build reads 1"));
}

TEST(Blocks, AreDistributedWithoutGapOrOverlap) {
  const TemporaryFolder folder;
  write_text(folder.path() / "a", std::string(1000, 'a'));
  write_text(folder.path() / "b", std::string(10, 'b'));
  write_text(folder.path() / "c", "");
  for (int shares = 1; shares < 9; ++shares) {
    std::vector<std::pair<std::size_t, std::uint64_t>> seen;
    for (int share = 0; share < shares; ++share)
      read_blocks(folder.path(), {{"a", 1000}, {"b", 10}, {"c", 0}}, 256, share, shares,
                  [&](const BlockRead& read) {
                    EXPECT_EQ(read.bytes.size(), read.end - read.begin);
                    seen.emplace_back(read.file, read.begin);
                  });
    EXPECT_EQ(seen, (std::vector<std::pair<std::size_t, std::uint64_t>>{
                        {0, 0}, {0, 256}, {0, 512}, {0, 768}, {1, 0}}))
        << shares;
  }
}

// Every byte of every file, a random bit of it.
TEST(Damage, OfAnyByteIsFoundAndNamed) {
  const TemporaryFolder folder;
  save_alone(folder.path(), 3);
  const auto path = folder.path() / "step-00000003";
  SingleRankAgreement agreement;
  ASSERT_TRUE(find_damage(agreement, path).empty());
  std::mt19937 random(5);
  for (const auto& [name, content] : contents_of(path))
    for (std::size_t at = 0; at < content.size(); ++at) {
      const char bit = static_cast<char>(1u << random() % 8);
      flip(path / name, at, bit);
      const auto damages = find_damage(agreement, path);
      ASSERT_EQ(damages.size(), 1u) << name << " byte " << at;
      EXPECT_EQ(damages[0].file, name);
      if (name != "index.json") {
        EXPECT_TRUE(damages[0].begin <= at && at < damages[0].end && damages[0].end - damages[0].begin <= 256)
            << to_text(damages[0]);
      }
      flip(path / name, at, bit);
    }
  EXPECT_TRUE(find_damage(agreement, path).empty());
}

TEST(Damage, ByTruncationAtAnyLength) {
  const TemporaryFolder folder;
  save_alone(folder.path(), 3);
  const auto path = folder.path() / "step-00000003";
  SingleRankAgreement agreement;
  std::mt19937 random(6);
  for (const auto& [name, content] : contents_of(path)) {
    std::set<std::size_t> lengths{0, 1, 7, 8, content.size() - 1};
    for (int i = 0; i < 25; ++i) lengths.insert(random() % content.size());
    for (const std::size_t length : lengths) {
      if (length >= content.size()) continue;
      write_text(path / name, content.substr(0, length));
      const auto damages = find_damage(agreement, path, random() % 2 == 0);
      ASSERT_EQ(damages.size(), 1u) << name << " cut to " << length;
      EXPECT_EQ(damages[0].file, name);
      if (name != "index.json") {
        EXPECT_EQ(to_text(damages[0]), name + " bytes " + std::to_string(length) + "-" +
                                           std::to_string(content.size()) + ": missing: the file has " +
                                           std::to_string(length) + " of " + std::to_string(content.size()) +
                                           " bytes");
      }
    }
    write_text(path / name, content + "x");
    EXPECT_EQ(find_damage(agreement, path, false).size(), 1u) << name << " with a byte more";
    fs::remove(path / name);
    EXPECT_EQ(find_damage(agreement, path).size(), 1u) << name << " removed";
    write_text(path / name, content);
  }
}

TEST(OpenLatest, FallsBackOnlyIfAllowedAndSaysSoEverywhere) {
  const TemporaryFolder folder;
  {
    SingleRankAgreement agreement;
    EXPECT_FALSE(open_latest(agreement, folder.path() / "nothing"));
  }
  save_alone(folder.path(), 100, small_blocks(), 1);
  save_alone(folder.path(), 200, small_blocks(), 2);
  const auto file = folder.path() / "step-00000200" / "model.safetensors";
  std::string content = read_text(file);
  content.back() ^= 1;
  write_text(file, content);
  expect_same_error(
      errors_on_ranks(3, [&](RankAgreement& agreement) { open_latest(agreement, folder.path()); }),
      "allow the use of the previous one (step 100)");
  std::mutex mutex;
  std::set<std::string> reasons;
  expect_no_errors(errors_on_ranks(3, [&](RankAgreement& agreement) {
    const auto opened = open_latest(agreement, folder.path(), {.allow_fallback = true});
    EXPECT_EQ(opened->checkpoint.step(), 100);
    EXPECT_TRUE(is_sample(opened->checkpoint, 1));
    std::lock_guard lock(mutex);
    ASSERT_EQ(opened->skipped.size(), 1u);
    reasons.insert(opened->skipped[0]);
  }));
  EXPECT_EQ(reasons.size(), 1u);
  EXPECT_TRUE(has_text(*reasons.begin(), "model.safetensors bytes"));
  // Damage is not detected without reading the blocks, as requested.
  SingleRankAgreement agreement;
  EXPECT_EQ(open_latest(agreement, folder.path(), {.verify = false})->checkpoint.step(), 200);
  EXPECT_THROW(open_checkpoint(agreement, folder.path() / "step-00000200"), CheckpointError);
  EXPECT_EQ(open_checkpoint(agreement, folder.path() / "step-00000100").step(), 100);
  fs::remove(folder.path() / "step-00000100" / "index.json");
  expect_same_error(
      errors_on_ranks(
          2, [&](RankAgreement& other) { open_latest(other, folder.path(), {.allow_fallback = true}); }),
      "every checkpoint in");
}

TEST(OpenLatest, ANewerFormatIsNotDamage) {
  const TemporaryFolder folder;
  save_alone(folder.path(), 100);
  save_alone(folder.path(), 200);
  const auto index = folder.path() / "step-00000200" / "index.json";
  std::string text = read_text(index);
  text.replace(text.find("\"version\": 1"), 12, "\"version\": 2");
  write_text(index, text);
  for (const bool fallback : {false, true}) {
    const auto errors = errors_on_ranks(3, [&](RankAgreement& agreement) {
      open_latest(agreement, folder.path(), {.allow_fallback = fallback});
    });
    expect_same_error(
        errors,
        "index.json: format version 2, this build reads 1; it was written by a newer version of Penstock");
    EXPECT_EQ(errors[0].find("damaged"), std::string::npos) << errors[0];
    EXPECT_EQ(errors[0].find("rank"), std::string::npos) << "all ranks report the same error: " << errors[0];
  }
  SingleRankAgreement agreement;
  EXPECT_EQ(message_of<CheckpointError>([&] {
              open_checkpoint(agreement, folder.path() / "step-00000200");
            }).find("damaged"),
            std::string::npos);
}

TEST(Agreement, AnErrorOfAllRanksIsReportedOnce) {
  const auto all = errors_on_ranks(3, [](RankAgreement& agreement) {
    agreement.agree("x", [] { throw ConfigError("too little data"); });
  });
  for (const std::string& error : all) EXPECT_EQ(error, "too little data");
  const auto first = errors_on_ranks(3, [](RankAgreement& agreement) {
    agreement.agree("x", [&] {
      if (agreement.rank() == 0) throw ConfigError("no such file");
    });
  });
  for (const std::string& error : first) EXPECT_EQ(error, "no such file");
  const auto some = errors_on_ranks(4, [](RankAgreement& agreement) {
    agreement.agree("x", [&] {
      if (agreement.rank() > 1) throw std::runtime_error("full disk");
    });
  });
  for (const std::string& error : some) EXPECT_EQ(error, "ranks 2, 3: full disk");
  SingleRankAgreement alone;
  EXPECT_THROW(alone.agree("x", [] { throw ConfigError("x"); }), ConfigError);
  EXPECT_THROW(alone.agree("x", [] { throw std::runtime_error("x"); }), CheckpointError);
}

TEST(Agreement, AnErrorKeepsTheTypeThatAllItsRanksHave) {
  const auto type_on_ranks = [](const std::function<void(int)>& work) {
    std::vector<std::string> types(3);
    const auto errors = errors_on_ranks(3, [&](RankAgreement& agreement) {
      std::string& type = types[static_cast<std::size_t>(agreement.rank())];
      try {
        agreement.agree("x", [&] { work(agreement.rank()); });
      } catch (const CheckpointFormatError&) {
        type = "format";
      } catch (const CheckpointError&) {
        type = "checkpoint";
      } catch (const NotImplemented&) {
        type = "not implemented";
      } catch (const InvariantError&) {
        type = "invariant";
      }
    });
    expect_no_errors(errors);
    EXPECT_EQ(types, std::vector<std::string>(3, types[0]));
    return types[0];
  };
  EXPECT_EQ(type_on_ranks([](int) { throw CheckpointFormatError("newer"); }), "format");
  EXPECT_EQ(type_on_ranks([](int rank) {
              if (rank == 2) throw NotImplemented("no such kind");
            }),
            "not implemented");
  EXPECT_EQ(type_on_ranks([](int rank) {
              if (rank > 0) throw InvariantError("broken");
            }),
            "invariant");
  EXPECT_EQ(type_on_ranks([](int rank) {
              if (rank == 0) throw CheckpointFormatError("newer");
              if (rank == 1) throw std::runtime_error("full disk");
              if (rank == 2) throw CheckpointFormatError("newer");
            }),
            "checkpoint");
}

TEST(OpenLatest, RanksThatSeeAnotherFolderAreNamed) {
  const TemporaryFolder folder, other;
  save_alone(folder.path(), 100);
  expect_same_error(errors_on_ranks(3,
                                    [&](RankAgreement& agreement) {
                                      open_latest(agreement,
                                                  agreement.rank() == 2 ? other.path() : folder.path());
                                    }),
                    "rank 2: ");
  expect_same_error(errors_on_ranks(3,
                                    [&](RankAgreement& agreement) {
                                      save(agreement, agreement.rank() == 1 ? other.path() : folder.path(),
                                           200, layouts()[2]);
                                    }),
                    "rank 1: ");
  EXPECT_EQ(find_checkpoints(folder.path()).size(), 1u);
  EXPECT_EQ(contents_of(folder.path()).size(), 1u) << "the temporary folder is gone";
}

TEST(Folder, NamesAndSteps) {
  EXPECT_EQ(step_folder_name(120), "step-00000120");
  EXPECT_EQ(step_folder_name(1234567890), "step-1234567890");
  EXPECT_THROW(step_folder_name(-1), ValueError);
  for (const std::int64_t step : {std::int64_t{0}, std::int64_t{120}, std::int64_t{1234567890}})
    EXPECT_EQ(step_of_folder_name(step_folder_name(step)), step);
  for (const char* name : {"step-", "step-12", "step-0000012x", "xstep-00000001", "step-000000001",
                           "step-99999999999999999999", ".step-00000001.writing"})
    EXPECT_FALSE(step_of_folder_name(name)) << name;
}

TEST(Folder, TheLastOnesAreKept) {
  const TemporaryFolder folder;
  WriteOptions options = small_blocks();
  options.keep_last = 2;
  save_alone(folder.path(), 900, options);  // a later step, of another run
  for (const std::int64_t step : {10, 20, 30, 40}) save_alone(folder.path(), step, options);
  std::vector<std::int64_t> steps;
  for (const FoundCheckpoint& found : find_checkpoints(folder.path())) steps.push_back(found.step);
  EXPECT_EQ(steps, (std::vector<std::int64_t>{30, 40, 900}));
  options.keep_last = 0;
  save_alone(folder.path(), 50, options);
  EXPECT_EQ(find_checkpoints(folder.path()).size(), 4u);
}

TEST(Folder, AStepThatIsWrittenAgainIsReplaced) {
  const TemporaryFolder folder;
  save_alone(folder.path(), 5, small_blocks(), 1);
  save_alone(folder.path(), 5, small_blocks(), 2);
  SingleRankAgreement agreement;
  EXPECT_TRUE(is_sample(open_latest(agreement, folder.path())->checkpoint, 2));
  EXPECT_EQ(contents_of(folder.path()).size(), 1u);
}

TEST(Folder, LeftoversAreRecognised) {
  const TemporaryFolder folder;
  save_alone(folder.path(), 5);
  fs::create_directories(folder.path() / ".step-00000006.writing");
  write_text(folder.path() / ".step-00000006.writing" / "model.safetensors", "half");
  fs::create_directories(folder.path() / ".step-00000004.removing");
  fs::rename(folder.path() / "step-00000005", folder.path() / ".step-00000005.replaced");
  fs::create_directories(folder.path() / ".mine.writing");
  EXPECT_TRUE(find_checkpoints(folder.path()).empty());
  EXPECT_EQ(clean_leftovers(folder.path()),
            (std::vector<std::string>{".step-00000004.removing", ".step-00000005.replaced",
                                      ".step-00000006.writing"}));
  SingleRankAgreement agreement;
  EXPECT_TRUE(is_sample(open_latest(agreement, folder.path())->checkpoint)) << "it has its name again";
  EXPECT_TRUE(fs::exists(folder.path() / ".mine.writing")) << "foreign files are kept";
}

TEST(Folder, OneWriterAtATime) {
  const TemporaryFolder folder;
  {
    const FolderLock lock(folder.path() / "run");
    EXPECT_TRUE(has_text(message_of<CheckpointError>([&] { FolderLock(folder.path() / "run"); }),
                         "another run is writing its checkpoints there"));
  }
  const FolderLock again(folder.path() / "run");
}

// Readers open checkpoints while others are written and removed: each one sees a whole checkpoint or none.
TEST(Folder, ReadersBesideAWriter) {
  const TemporaryFolder folder;
  WriteOptions options = small_blocks();
  options.keep_last = 1;
  save_alone(folder.path(), 1, options, 1);
  std::atomic<bool> ending{false};
  std::atomic<int> reads{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i)
    readers.emplace_back([&] {
      while (!ending || reads < 3) {
        const auto found = find_checkpoints(folder.path());
        if (found.empty()) continue;
        std::optional<Checkpoint> checkpoint;
        try {
          checkpoint.emplace(found.back().path);
        } catch (const CheckpointError& error) {
          ASSERT_TRUE(has_text(error.what(), "No such file")) << "it was removed in between";
          continue;
        }
        // Once open, it stays readable.
        EXPECT_TRUE(is_sample(*checkpoint, static_cast<unsigned>(checkpoint->step())));
        ++reads;
      }
    });
  for (unsigned step = 2; step < 12; ++step) save_alone(folder.path(), step, options, step);
  ending = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_GE(reads, 3);
}

}  // namespace checkpoint_files_test
}  // namespace penstock::checkpoint
