// Splitting and merging of batches, against reference data and by hand.
#include "penstock/pipeline/microbatch.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "penstock/base/errors.h"
#include "tests/golden_data.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock {
namespace microbatch_test {

using test::message_of;
using nlohmann::json;
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
  throw std::runtime_error("a value that is not known here: " + item.dump());
}

Tree spec_of(const json& item) {
  if (item.is_null()) return {};
  if (item.is_string()) {
    if (item.get<std::string>() != "replicate") throw std::runtime_error("a spec that is not known here: " + item.dump());
    return whole();
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
      for (std::size_t i = 0; i < expected.size(); ++i) expect_equal(expected[i], actual[i], where + "[" + std::to_string(i) + "]");
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
      return split_microbatches(tree_of(item.at("args")), tree_of(item.at("kwargs")), item.at("chunks").get<int>(),
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

TEST(GoldenMicrobatch, Merges) {
  const json index = test::golden_index("mapping");
  for (const json& item : index.at("merges")) {
    const std::string id = item.at("id");
    const auto merge = [&] {
      std::vector<Tree> chunks;
      for (const json& chunk : item.at("chunks")) chunks.push_back(tree_of(chunk));
      return merge_microbatches(chunks, spec_of(item.at("spec")));
    };
    if (item.contains("error_type"))
      EXPECT_THROW(merge(), ValueError) << id;
    else
      expect_equal(item.at("result"), merge(), id);
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

TEST(Microbatch, OneSpecServesAContainer) {
  const at::Tensor x = at::ones({2, 6}), y = at::ones({3, 6});
  const Microbatches parts = split_microbatches(Tree::tuple({Tree::list({x, y}), at::ones({5})}), {}, 3, {.args = Tree::tuple({chunk_dim(1), whole()}), .kwargs = {}});
  EXPECT_EQ(parts.count(), 3u);
  EXPECT_EQ(parts.args[2][0][1].tensor().sizes(), at::IntArrayRef({3, 2}));
  EXPECT_EQ(parts.args[2][1].tensor().sizes(), at::IntArrayRef({5}));
}

TEST(Microbatch, LossesOfMicrobatchesBecomeAList) {
  const Tree merged = merge_microbatches({Tree(at::tensor(1.0)), Tree(at::tensor(2.0))});
  EXPECT_TRUE(at::equal(merged.tensor(), at::tensor({1.0, 2.0})));
}

TEST(Microbatch, SaysWhatIsWrong) {
  const at::Tensor x = at::ones({4, 2});
  EXPECT_TRUE(test::has_text(message_of<ValueError>([&] { split_microbatches(Tree::tuple({x}), {}, 0); }), "at least 1"));
  EXPECT_TRUE(test::has_text(message_of<ValueError>([&] { split_microbatches(x, {}, 2); }), "Tree::tuple({x})"));
  EXPECT_TRUE(test::has_text(message_of<ValueError>([&] { split_microbatches(Tree::tuple({x}), {}, 2, {.args = Tree::tuple({chunk_dim(2)}), .kwargs = {}}); }), "args[0]"));
  EXPECT_TRUE(test::has_text(message_of<ValueError>([&] { split_microbatches(Tree::tuple({}), Tree::dict({{"n", 3}}), 2, {.args = {}, .kwargs = Tree::dict({{"n", chunk_dim(0)}})}); }), "kwargs['n']"));
  EXPECT_TRUE(test::has_text(message_of<ValueError>([&] { split_microbatches(Tree::tuple({at::ones({0, 2})}), {}, 2); }), "at least one row"));
  EXPECT_TRUE(test::has_text(message_of<ValueError>([&] { merge_microbatches({}); }), "no microbatches"));
  EXPECT_TRUE(test::has_text(message_of<ValueError>([&] { merge_microbatches({Tree::tuple({x, 3}), Tree::tuple({x, 4})}); }), "output[1] of microbatch 1"));
  EXPECT_TRUE(test::has_text(message_of<ValueError>([&] { merge_microbatches({Tree::tuple({x}), Tree::tuple({x, x})}); }), "another structure"));
}

}  // namespace microbatch_test
}  // namespace penstock
