// Splitting and merging of batches, compared with reference data and with results computed by hand.
#include "penstock/microbatch.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/errors.h"
#include "tests/golden_data.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock {
namespace microbatch_test {

using nlohmann::json;
using test::message_of;
using Numbers = std::vector<std::int64_t>;

// A value of the reference data: a leaf says whether it is a tensor; lists are tuples.
Tree tree_of(const json& item) {
  if (item.is_array()) {
    std::vector<Tree> entries;
    for (const json& entry : item) entries.push_back(tree_of(entry));
    return Tree::tuple(std::move(entries));
  }
  if (!item.contains("tensor")) {
    std::vector<Tree::Item> items;
    for (const auto& [key, value] : item.items()) items.emplace_back(key, tree_of(value));
    return Tree::dict(std::move(items));
  }
  if (item.at("tensor").get<bool>()) {
    const Numbers shape = item.at("shape").get<Numbers>(), stride = item.at("stride").get<Numbers>();
    at::Tensor tensor = at::empty_strided(shape, stride, at::kFloat);
    tensor.copy_(at::tensor(item.at("values").get<std::vector<float>>(), at::kFloat).view(shape));
    return tensor;
  }
  const json& value = item.at("value");
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer()) return value.get<std::int64_t>();
  if (value.is_number()) return value.get<double>();
  if (value.is_string()) return value.get<std::string>();
  if (value.is_null()) return {};
  throw std::runtime_error("unknown value: " + item.dump());
}

Tree spec_of(const json& item) {
  if (item.is_null()) return {};
  if (item.is_string()) {
    if (item == "sum" || item == "sum_reducer") return sum_reducer();
    if (item != "replicate") throw std::runtime_error("unknown spec: " + item.dump());
    return whole();
  }
  // A reducer may be written as a string or as an object with its name.
  for (const char* key : {"reducer", "custom_reducer", "reduce"})
    if (item.is_object() && item.size() == 1 && item.contains(key) && item.at(key).is_string()) {
      if (item.at(key) != "sum") throw std::runtime_error("unknown reducer: " + item.dump());
      return sum_reducer();
    }
  if (item.is_array()) {
    std::vector<Tree> entries;
    for (const json& entry : item) entries.push_back(spec_of(entry));
    return Tree::tuple(std::move(entries));
  }
  if (item.contains("chunk_dim")) return chunk_dim(item.at("chunk_dim").get<std::int64_t>());
  std::vector<Tree::Item> items;
  for (const auto& [key, value] : item.items()) items.emplace_back(key, spec_of(value));
  return Tree::dict(std::move(items));
}

void expect_equal(const json& expected, const Tree& actual, const std::string& where) {
  if (expected.is_array() || !expected.contains("tensor")) {
    ASSERT_EQ(actual.size(), expected.size()) << where;
    if (expected.is_array())
      for (std::size_t i = 0; i < expected.size(); ++i)
        expect_equal(expected[i], actual[i], where + "[" + std::to_string(i) + "]");
    else
      for (const auto& [key, value] : expected.items()) expect_equal(value, actual[key], where + "." + key);
    return;
  }
  if (!expected.at("tensor").get<bool>()) {
    EXPECT_EQ(actual.to_string(), tree_of(expected).to_string()) << where;
    return;
  }
  const at::Tensor wanted = tree_of(expected).tensor(), got = actual.tensor();
  EXPECT_TRUE(got.sizes() == wanted.sizes() && at::equal(got, wanted)) << where;
  EXPECT_EQ(got.strides().vec(), expected.at("stride").get<Numbers>()) << where;
  EXPECT_EQ(got.storage_offset(), expected.at("storage_offset").get<std::int64_t>()) << where;
}

TEST(GoldenMicrobatch, Splits) {
  const json index = test::golden_index("mapping");
  for (const json& item : index.at("splits")) {
    const std::string id = item.at("id");
    const auto split = [&] {
      return split_microbatches(
          tree_of(item.at("args")), tree_of(item.at("kwargs")), item.at("chunks").get<int>(),
          {.args = spec_of(item.at("args_spec")), .kwargs = spec_of(item.at("kwargs_spec"))});
    };
    if (item.contains("error_type")) {
      EXPECT_THROW(split(), ValueError) << id;
      continue;
    }
    const Microbatches parts = split();
    ASSERT_EQ(parts.count(), item.at("num_chunks").get<std::size_t>()) << id;
    for (std::size_t i = 0; i < parts.count(); ++i) {
      expect_equal(item.at("args_chunks")[i], parts.args[i], id + " args of " + std::to_string(i));
      expect_equal(item.at("kwargs_chunks")[i], parts.kwargs[i], id + " kwargs of " + std::to_string(i));
    }
  }
  EXPECT_FALSE(index.at("splits").empty());
  std::cout << index.at("splits").size() << " cases of splits\n";
}

// PyTorch's default concatenates every leaf along dim 0 and therefore rejects tensors without dims
// (RuntimeError) and values (TypeError). Penstock joins the former into one tensor with one element per
// microbatch and keeps the latter if they agree.
template <class Merge>
void expect_better(const json& chunks, const Merge& merge, const std::string& id) {
  std::vector<std::vector<Tree>> leaves;
  for (const json& chunk : chunks) leaves.push_back(flatten_tree(tree_of(chunk)).leaves);
  int special = 0;
  bool differ = false;
  for (std::size_t leaf = 0; leaf < leaves[0].size(); ++leaf)
    for (const auto& chunk : leaves) {
      ASSERT_EQ(chunk.size(), leaves[0].size()) << id;
      special += !chunk[leaf].is_tensor() || chunk[leaf].tensor().dim() == 0;
      differ = differ || (!chunk[leaf].is_tensor() && chunk[leaf].to_string() != leaves[0][leaf].to_string());
    }
  ASSERT_GT(special, 0) << id << ": refused for an unknown reason";
  if (differ) {
    EXPECT_THROW(merge(), ValueError) << id;
    return;
  }
  const std::vector<Tree> merged = flatten_tree(merge()).leaves;
  for (std::size_t leaf = 0; leaf < merged.size(); ++leaf) {
    std::vector<at::Tensor> parts;
    for (const auto& chunk : leaves)
      if (chunk[leaf].is_tensor()) parts.push_back(chunk[leaf].tensor());
    if (parts.empty()) {
      EXPECT_EQ(merged[leaf].to_string(), leaves[0][leaf].to_string()) << id;
    } else {
      EXPECT_TRUE(at::equal(merged[leaf].tensor(), parts[0].dim() == 0 ? at::stack(parts) : at::cat(parts)))
          << id;
    }
  }
}

TEST(GoldenMicrobatch, Merges) {
  const json index = test::golden_index("mapping");
  for (const json& item : index.at("merges")) {
    const std::string id = item.at("id");
    const auto merge = [&] {
      std::vector<Tree> chunks;
      for (const json& chunk : item.at("chunks")) chunks.push_back(tree_of(chunk));
      return merge_microbatches(chunks, spec_of(item.at("spec")));
    };
    const std::string error = item.value("error_type", "");
    if (item.at("spec").is_null() && (error == "RuntimeError" || error == "TypeError")) {
      expect_better(item.at("chunks"), merge, id);
    } else if (error == "ValueError" && item.at("chunks")[0].is_array() && item.at("spec").is_object() &&
               item.at("spec").contains("chunk_dim")) {
      EXPECT_NO_THROW(merge()) << id;  // Penstock accepts one entry for all leaves of a container
    } else if (!error.empty()) {
      EXPECT_THROW(merge(), ValueError) << id;
    } else {
      expect_equal(item.at("result"), merge(), id);
    }
  }
  EXPECT_FALSE(index.at("merges").empty());
  std::cout << index.at("merges").size() << " cases of merges\n";
}

TEST(Microbatch, PartsOfAnotherShapeAreNamed) {
  const auto merge = [](const at::Tensor& second) {
    return message_of<ValueError>([&] { merge_microbatches({Tree(at::ones({2, 3})), Tree(second)}); });
  };
  EXPECT_TRUE(test::has_text(merge(at::ones({2, 4})), "microbatch 1"));
  EXPECT_TRUE(test::has_text(merge(at::ones({2, 4})), "[2, 4]"));
  EXPECT_TRUE(test::has_text(merge(at::ones({2})), "[2, 3]"));
}

TEST(Microbatch, MergeUndoesSplit) {
  const at::Tensor x = at::arange(42, at::kFloat).view({7, 6}), y = at::arange(7);
  const Tree args = Tree::tuple({x, Tree::dict({{"y", y}, {"scale", 0.5}})});
  for (int count = 1; count <= 9; ++count) {
    const Microbatches parts = split_microbatches(args, {}, count);
    EXPECT_EQ(parts.count(), std::min<std::size_t>(static_cast<std::size_t>(count), 7));
    const Tree merged = merge_microbatches(parts.args);
    EXPECT_TRUE(at::equal(merged[0].tensor(), x));
    EXPECT_TRUE(at::equal(merged[1]["y"].tensor(), y));
    EXPECT_EQ(merged[1]["scale"].number(), 0.5);
    // Parts are views of the batch: gradients reach it.
    EXPECT_TRUE(parts.args[0][0].tensor().is_alias_of(x));
  }
}

// Arguments, keyword arguments and target are cut at the same rows, also unevenly, so that metadata of a
// batch stays with its rows. What has no rows, and what is said to be whole, goes to every microbatch.
TEST(Microbatch, MetadataIsCutAtTheRowsOfTheArgumentsAndTheTarget) {
  for (std::int64_t rows = 1; rows <= 13; ++rows)
    for (int count = 1; count <= rows; ++count) {
      const at::Tensor x = at::arange(rows * 2).view({rows, 2}), ids = at::arange(rows);
      const Tree metadata = Tree::dict({{"documents", ids * 10},
                                        {"relations", ids.view({rows, 1, 1}).expand({rows, 3, 3})},
                                        {"scale", at::scalar_tensor(0.5)},
                                        {"bias", at::ones({1})},
                                        {"slots", 4},
                                        {"kind", "text"},
                                        {"none", Tree()}});
      const Tree spec = Tree::dict({{"documents", Tree()},
                                    {"relations", Tree()},
                                    {"scale", Tree()},
                                    {"bias", whole()},
                                    {"slots", Tree()},
                                    {"kind", Tree()},
                                    {"none", Tree()}});
      const Microbatches parts =
          split_microbatches(Tree::tuple({x}), metadata, count, {.args = {}, .kwargs = spec});
      const std::vector<Tree> targets = split_tree(ids + 100, count);
      const std::string place = std::to_string(rows) + " rows in " + std::to_string(count);
      ASSERT_EQ(parts.count(), static_cast<std::size_t>(count)) << place;
      ASSERT_EQ(targets.size(), parts.count()) << place;
      for (std::size_t m = 0; m < parts.count(); ++m) {
        const at::Tensor own = parts.args[m][0].tensor().select(1, 0).div(2, "floor");
        const Tree& named = parts.kwargs[m];
        EXPECT_TRUE(at::equal(named["documents"].tensor(), own * 10)) << place;
        EXPECT_TRUE(at::equal(named["relations"].tensor().select(1, 2).select(1, 1), own)) << place;
        EXPECT_TRUE(at::equal(targets[m].tensor(), own + 100)) << place;
        EXPECT_TRUE(at::equal(named["scale"].tensor(), at::scalar_tensor(0.5))) << place;
        EXPECT_TRUE(at::equal(named["bias"].tensor(), at::ones({1}))) << place;
        EXPECT_EQ(named["slots"].integer(), 4);
        EXPECT_EQ(named["kind"].text(), "text");
        EXPECT_TRUE(named["none"].is_none());
      }
      // A tensor with one element is a batch of one row: too few for more microbatches, which a pipeline
      // refuses.
      EXPECT_EQ(split_microbatches(Tree::tuple({x}), Tree::dict({{"bias", at::ones({1})}}), count).count(),
                1U);
    }
}

TEST(Microbatch, OneSpecServesAContainer) {
  const at::Tensor x = at::ones({2, 6}), y = at::ones({3, 6});
  const Microbatches parts = split_microbatches(Tree::tuple({Tree::list({x, y}), at::ones({5})}), {}, 3,
                                                {.args = Tree::tuple({chunk_dim(1), whole()}), .kwargs = {}});
  EXPECT_EQ(parts.count(), 3u);
  EXPECT_EQ(parts.args[2][0][1].tensor().sizes(), at::IntArrayRef({3, 2}));
  EXPECT_EQ(parts.args[2][1].tensor().sizes(), at::IntArrayRef({5}));
}

TEST(Microbatch, LossesOfMicrobatchesBecomeAList) {
  const Tree merged = merge_microbatches({Tree(at::tensor(1.0)), Tree(at::tensor(2.0))});
  EXPECT_TRUE(at::equal(merged.tensor(), at::tensor({1.0, 2.0})));
}

// The numbers and dtypes are those of PyTorch 2.14's merge_chunks with sum_reducer.
TEST(Microbatch, ReducersFoldWhatMicrobatchesReturn) {
  const auto sum = [](const std::vector<Tree>& microbatches) {
    return merge_microbatches(microbatches, sum_reducer()).tensor();
  };
  EXPECT_TRUE(at::equal(sum({at::scalar_tensor(1.5f), at::scalar_tensor(2.f), at::scalar_tensor(4.f)}),
                        at::scalar_tensor(7.5f)));
  EXPECT_TRUE(at::equal(sum({at::ones({2, 3}), at::full({2, 3}, 2.f)}), at::full({2, 3}, 3.f)));
  EXPECT_EQ(sum({at::ones({2}, at::kLong), at::ones({2}, at::kLong)}).scalar_type(), at::kFloat);
  EXPECT_EQ(sum({at::ones({2}, at::kDouble), at::ones({2}, at::kDouble)}).scalar_type(), at::kDouble);
  EXPECT_TRUE(at::equal(sum({Tree(3), Tree(0.25)}), at::scalar_tensor(3.25f)));
  // One leaf is reduced, others are concatenated.
  const Tree mixed =
      merge_microbatches({Tree::dict({{"y", at::ones({1, 2})}, {"loss", at::scalar_tensor(1.f)}}),
                          Tree::dict({{"y", at::zeros({2, 2})}, {"loss", at::scalar_tensor(2.f)}})},
                         Tree::dict({{"y", chunk_dim(0)}, {"loss", sum_reducer()}}));
  EXPECT_EQ(mixed["y"].tensor().sizes(), at::IntArrayRef({3, 2}));
  EXPECT_EQ(mixed["loss"].tensor().item<float>(), 3);
  // In the order of the microbatches, from the initial value.
  const Tree text = merge_microbatches({Tree("a"), Tree("b"), Tree("c")},
                                       reducer(Tree(">"), [](const Tree& before, const Tree& leaf) {
                                         return Tree(before.text() + leaf.text());
                                       }));
  EXPECT_EQ(text.text(), ">abc");
  // Gradients pass through.
  const at::Tensor x = at::ones({}).requires_grad_(), y = at::ones({}).requires_grad_();
  sum({x * 2, y * 3}).backward();
  EXPECT_EQ(x.grad().item<float>(), 2);
  EXPECT_EQ(y.grad().item<float>(), 3);
  EXPECT_THROW(merge_microbatches({Tree("a")}, sum_reducer()), TypeError);
  EXPECT_THROW(reducer(Tree(), nullptr), ValueError);
  EXPECT_THROW(merge_microbatches({Tree(1)}, Tree::object(c10::IValue(at::Device(at::kCPU)))), ValueError);
  EXPECT_TRUE(test::has_text(message_of<ValueError>([&] {
                               split_microbatches(Tree::tuple({at::ones({2})}), {}, 2,
                                                  {.args = Tree::tuple({sum_reducer()}), .kwargs = {}});
                             }),
                             "only with merge_microbatches"));
}

TEST(Microbatch, SaysWhatIsWrong) {
  const at::Tensor x = at::ones({4, 2});
  EXPECT_TRUE(test::has_text(message_of<ValueError>([&] { split_microbatches(Tree::tuple({x}), {}, 0); }),
                             "at least 1"));
  EXPECT_TRUE(
      test::has_text(message_of<ValueError>([&] { split_microbatches(x, {}, 2); }), "Tree::tuple({x})"));
  EXPECT_TRUE(test::has_text(message_of<ValueError>([&] {
                               split_microbatches(Tree::tuple({x}), {}, 2,
                                                  {.args = Tree::tuple({chunk_dim(2)}), .kwargs = {}});
                             }),
                             "args[0]"));
  EXPECT_TRUE(test::has_text(message_of<ValueError>([&] {
                               split_microbatches(Tree::tuple({}), Tree::dict({{"n", 3}}), 2,
                                                  {.args = {}, .kwargs = Tree::dict({{"n", chunk_dim(0)}})});
                             }),
                             "kwargs['n']"));
  EXPECT_TRUE(test::has_text(message_of<ValueError>([&] {
                               split_microbatches(Tree::tuple({at::ones({0, 2})}), {}, 2);
                             }),
                             "at least one row"));
  EXPECT_TRUE(test::has_text(message_of<ValueError>([&] { merge_microbatches({}); }), "no microbatches"));
  EXPECT_TRUE(test::has_text(message_of<ValueError>([&] {
                               merge_microbatches({Tree::tuple({x, 3}), Tree::tuple({x, 4})});
                             }),
                             "output[1] of microbatch 1"));
  EXPECT_TRUE(test::has_text(message_of<ValueError>([&] {
                               merge_microbatches({Tree::tuple({x}), Tree::tuple({x, x})});
                             }),
                             "differs in structure"));
}

}  // namespace microbatch_test
}  // namespace penstock
