#include "penstock/pytree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <unordered_set>

#ifdef PENSTOCK_HAVE_RAPIDCHECK
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>
#endif

#include "penstock/errors.h"
#include "penstock/pytree_convert.h"
#include "tests/throws.h"

namespace penstock {
namespace pytree_test {

using test::message_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Same structure, and leaves of the same kind and value; tensors are compared by identity.
bool same(const Tree& a, const Tree& b) {
  const auto [a_leaves, a_spec] = flatten_tree(a);
  const auto [b_leaves, b_spec] = flatten_tree(b);
  if (a_spec != b_spec) return false;
  for (std::size_t i = 0; i < a_leaves.size(); ++i) {
    const Tree& x = a_leaves[i];
    const Tree& y = b_leaves[i];
    if (x.kind() != y.kind()) return false;
    if (x.is_tensor() ? !x.tensor().is_same(y.tensor()) : x.to_string() != y.to_string()) return false;
  }
  return true;
}

TEST(Tree, BracesAndLiteralsBuildWhatTheyShow) {
  const at::Tensor x = at::ones({2, 3});
  const Tree tree = Tree::tuple({x, Tree::dict({{"mask", at::Tensor()}, {"scale", 0.5}, {"name", "abc"}}),
                                 Tree::list({1, true, 2.5f})});
  EXPECT_EQ(tree.to_string(), "(float32[2, 3], {'mask': None, 'scale': 0.5, 'name': 'abc'}, [1, true, 2.5])");
  EXPECT_EQ(tree.kind(), Tree::Kind::Tuple);
  EXPECT_TRUE(tree[0].tensor().is_same(x));
  EXPECT_TRUE(tree[1]["mask"].is_none());
  EXPECT_EQ(tree[1]["scale"].number(), 0.5);
  EXPECT_EQ(tree[1]["name"].text(), "abc");
  EXPECT_EQ(tree[2][0].integer(), 1);
  EXPECT_EQ(tree[2][0].number(), 1.0);
  EXPECT_TRUE(tree[2][1].boolean());
  EXPECT_EQ(tree[1].find("nothing"), nullptr);
  EXPECT_EQ(Tree::tuple({}).to_string(), "()");
  EXPECT_EQ(Tree::tuple({x}).to_string(), "(float32[2, 3],)");
  EXPECT_EQ(Tree::tuple({Tree::tuple({1, 2}), Tree::tuple({3, 4})}).to_string(), "((1, 2), (3, 4))");
  EXPECT_EQ(Tree::tuple({"a", "b"}).to_string(), "('a', 'b')");
  EXPECT_EQ(Tree::dict({{"a", "b"}, {"c", "d"}}).to_string(), "{'a': 'b', 'c': 'd'}");
  EXPECT_EQ(Tree().to_string(), "None");
}

TEST(Tree, StandardTypesConvert) {
  const at::Tensor x = at::ones({2});
  EXPECT_EQ(Tree(std::vector<at::Tensor>{x, at::Tensor()}).to_string(), "[float32[2], None]");
  EXPECT_EQ(Tree(at::TensorList({x, x})).to_string(), "[float32[2], float32[2]]");
  EXPECT_EQ(Tree(std::tuple(x, 3, std::string("s"))).to_string(), "(float32[2], 3, 's')");
  EXPECT_EQ(Tree(std::tuple<Tree>(Tree(3))).to_string(), "(3,)");
  EXPECT_EQ(Tree(std::optional<at::Tensor>()).to_string(), "None");
  EXPECT_EQ(Tree(std::vector<std::vector<int>>{{1}, {}}).to_string(), "[[1], []]");
  EXPECT_EQ(Tree(std::vector<bool>{true, false}).to_string(), "[true, false]");
  EXPECT_EQ(Tree(std::int8_t{-1}).integer(), -1);
  EXPECT_EQ(Tree(std::numeric_limits<std::uint32_t>::max()).integer(), 4294967295);
  EXPECT_THAT(message_of<ValueError>([] { Tree(std::numeric_limits<std::uint64_t>::max()); }),
              HasSubstr("18446744073709551615"));
}

TEST(Tree, WrongAccessIsNamed) {
  const Tree tree = Tree::dict({{"mask", 3}, {"bias", Tree::list({1, 2})}});
  EXPECT_THAT(message_of<TypeError>([&] { (void)tree["mask"].tensor(); }),
              HasSubstr("got the int 3, expected a tensor"));
  EXPECT_THAT(message_of<TypeError>([&] { (void)tree["bias"].text(); }),
              HasSubstr("got a list of 2, expected a string"));
  EXPECT_THAT(message_of<TypeError>([&] { (void)tree["mask"][0]; }),
              HasSubstr("got the int 3, expected a tuple or a list"));
  EXPECT_THAT(message_of<ValueError>([&] { (void)tree["bias"][2]; }), HasSubstr("2 into a list of 2"));
  EXPECT_THAT(message_of<ValueError>([&] { (void)tree["masks"]; }), HasSubstr("did you mean 'mask'?"));
  EXPECT_THAT(message_of<TypeError>([&] { (void)tree["bias"]["x"]; }),
              HasSubstr("a dictionary with the key 'x'"));
  EXPECT_THROW((void)Tree(1).boolean(), TypeError);
  EXPECT_THROW((void)Tree(true).integer(), TypeError);
  EXPECT_THROW((void)Tree("1").number(), TypeError);
  EXPECT_THROW((void)Tree().ivalue(), TypeError);
  EXPECT_THAT(message_of<ValueError>([] { Tree::dict({{"a", 1}, {"a", 2}}); }), HasSubstr("'a' twice"));
}

TEST(Tree, FlattenKeepsTheOrderOfEntries) {
  const at::Tensor x = at::ones({1});
  const auto [leaves, spec] = flatten_tree(
      Tree::tuple({x, Tree::dict({{"z", 1}, {"a", Tree::list({2, std::nullopt})}}), Tree::tuple({})}));
  ASSERT_EQ(leaves.size(), 4u);
  EXPECT_TRUE(leaves[0].tensor().is_same(x));
  EXPECT_EQ(leaves[1].integer(), 1);  // as built, not by name
  EXPECT_EQ(leaves[2].integer(), 2);
  EXPECT_TRUE(leaves[3].is_none());  // nothing is a leaf
  EXPECT_EQ(spec.to_string(), "(*, {'z': *, 'a': [*, *]}, ())");
  EXPECT_EQ(spec.leaf_count(), 4u);
  EXPECT_THAT(spec.leaf_paths("kw"), ElementsAre("kw[0]", "kw[1]['z']", "kw[1]['a'][0]", "kw[1]['a'][1]"));
}

TEST(Tree, UnflattenNeedsOneLeafEach) {
  const TreeSpec spec(Tree::tuple({1, Tree::list({2})}));
  EXPECT_EQ(unflatten_tree({Tree("a"), Tree("b")}, spec).to_string(), "('a', ['b'])");
  EXPECT_EQ(unflatten_tree({Tree::tuple({1, 2}), Tree()}, spec).to_string(), "((1, 2), [None])");  // a graft
  for (const std::size_t count : {0, 1, 3}) {
    const auto text = message_of<ValueError>([&] { unflatten_tree(std::vector<Tree>(count), spec); });
    EXPECT_THAT(text, HasSubstr(std::to_string(count) + " leaves, expected 2 for (*, [*])"));
  }
  EXPECT_EQ(TreeSpec(), TreeSpec(Tree(5)));
  EXPECT_EQ(unflatten_tree({Tree(5)}, TreeSpec()).integer(), 5);
}

TEST(Tree, SpecsDifferWhereStructureDoes) {
  const std::vector<Tree> different = {
      1,
      Tree::tuple({}),
      Tree::list({}),
      Tree::dict({}),
      Tree::tuple({1}),
      Tree::list({1}),
      Tree::dict({{"a", 1}}),
      Tree::dict({{"b", 1}}),
      Tree::dict({{"a", 1}, {"b", 1}}),
      Tree::dict({{"b", 1}, {"a", 1}}),
      Tree::dict({{"a': *, 'b", 1}}),  // would look like two keys without quoting
      Tree::tuple({1, 1}),
      Tree::tuple({Tree::tuple({1}), 1}),
      Tree::tuple({1, Tree::tuple({1})}),
  };
  std::unordered_set<TreeSpec> specs;
  for (std::size_t i = 0; i < different.size(); ++i)
    for (std::size_t j = 0; j < different.size(); ++j) {
      const TreeSpec a(different[i]);
      const TreeSpec b(different[j]);
      specs.insert(a);
      EXPECT_EQ(a == b, i == j) << a.to_string() << " " << b.to_string();
      EXPECT_EQ(a.to_string() == b.to_string(), i == j) << a.to_string();
      EXPECT_EQ(first_difference(a, b).has_value(), i != j) << a.to_string() << " " << b.to_string();
    }
  EXPECT_EQ(specs.size(), different.size());
  // Leaves are not part of it.
  EXPECT_EQ(TreeSpec(Tree::tuple({1, "x"})), TreeSpec(Tree::tuple({at::ones({1}), Tree()})));
}

TEST(Tree, FirstDifferenceNamesThePlace) {
  const auto text = [](const Tree& expected, const Tree& actual) {
    return *first_difference(TreeSpec(expected), TreeSpec(actual));
  };
  EXPECT_EQ(text(Tree::tuple({1, Tree::dict({{"mask", 1}})}),
                 Tree::tuple({1, Tree::dict({{"mask", Tree::list({1, 2})}})})),
            "args[1]['mask']: got a list of 2, expected a leaf");
  EXPECT_EQ(text(Tree::tuple({1, Tree::dict({{"mask", 1}})}),
                 Tree::tuple({1, Tree::dict({{"mast", 1}, {"b", 1}})})),
            "args[1]: got a dictionary with keys 'mast', 'b', expected a dictionary with key 'mask'");
  EXPECT_EQ(text(1, Tree::tuple({})), "args: got a tuple of 0, expected a leaf");
}

TEST(Tree, MapChangesLeavesOnly) {
  const at::Tensor x = at::ones({2});
  const Tree tree = Tree::tuple({x, Tree::dict({{"n", 3}, {"y", x}}), Tree::list({Tree()})});
  const Tree twice = map_tree_tensors(tree, [](const at::Tensor& t) { return t * 2; });
  EXPECT_EQ(TreeSpec(twice), TreeSpec(tree));
  EXPECT_TRUE(at::equal(twice[1]["y"].tensor(), x * 2));
  EXPECT_EQ(twice[1]["n"].integer(), 3);
  EXPECT_TRUE(at::equal(x, at::ones({2})));
  int leaves = 0;
  map_tree(tree, [&](const Tree& leaf) { return ++leaves, leaf; });
  EXPECT_EQ(leaves, 4);
  const auto tensors = tensors_of(tree);
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_TRUE(tensors[1].is_same(x));
}

TEST(FlattenArgs, DetachMakesFreshLeavesThatKeepRequiresGrad) {
  const at::Tensor weight = at::ones({2}).requires_grad_(true);
  const at::Tensor hidden = weight * 3;  // not a leaf of autograd
  const at::Tensor index = at::arange(2);
  const at::Tensor constant = at::ones({2});
  const Tree args =
      Tree::tuple({hidden, Tree::dict({{"w", weight}, {"i", index}}), constant, "text", 7, Tree()});
  const auto [detached, flat] = flatten_args(args, kDetach);
  EXPECT_EQ(TreeSpec(detached), TreeSpec(args));
  ASSERT_EQ(flat.size(), 7u);
  EXPECT_TRUE(same(detached, unflatten_tree(flat, TreeSpec(args))));

  const at::Tensor h = detached[0].tensor();
  EXPECT_TRUE(h.requires_grad());
  EXPECT_TRUE(h.is_leaf());
  EXPECT_TRUE(h.is_alias_of(hidden));
  EXPECT_TRUE(flat[0].tensor().is_same(h));
  EXPECT_TRUE(detached[1]["w"].tensor().requires_grad());
  EXPECT_FALSE(detached[1]["w"].tensor().is_same(weight));
  EXPECT_FALSE(detached[1]["i"].tensor().requires_grad());
  EXPECT_FALSE(detached[2].tensor().requires_grad());
  EXPECT_EQ(detached[3].text(), "text");
  EXPECT_EQ(detached[4].integer(), 7);
  EXPECT_TRUE(detached[5].is_none());

  (h * 2).sum().backward();
  EXPECT_TRUE(at::equal(h.grad(), at::full({2}, 2.0)));
  EXPECT_FALSE(weight.grad().defined());  // backward stops at the boundary

  const auto plain = flatten_args(args);
  ASSERT_EQ(plain.size(), 7u);
  EXPECT_TRUE(plain[0].tensor().is_same(hidden));
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  const auto old = flatten_args_detach(args);
#pragma GCC diagnostic pop
  EXPECT_EQ(old.flat.size(), 7u);
  EXPECT_TRUE(old.args[0].tensor().is_leaf());
}

TEST(TreeTo, ReadsStandardTypes) {
  const at::Tensor x = at::ones({2});
  const Tree tree = Tree::tuple({x, Tree::dict({{"n", 3}}), Tree::list({1, 2.5}), Tree(), "s", true});
  const auto [t, map, numbers, nothing, text, flag] =
      tree_to<std::tuple<at::Tensor, std::map<std::string, int>, std::vector<double>,
                         std::optional<at::Tensor>, std::string, bool>>(tree);
  EXPECT_TRUE(t.is_same(x));
  EXPECT_EQ(map.at("n"), 3);
  EXPECT_EQ(numbers, (std::vector<double>{1, 2.5}));
  EXPECT_FALSE(nothing.has_value());
  EXPECT_EQ(text, "s");
  EXPECT_TRUE(flag);
  EXPECT_TRUE(same(tree_to<Tree>(tree), tree));
}

TEST(TreeTo, NamesThePlaceThatDoesNotFit) {
  const Tree tree = Tree::tuple({at::ones({2}), Tree::dict({{"mask", Tree::list({1, "two"})}})});
  using Wanted = std::tuple<at::Tensor, std::map<std::string, std::vector<int>>>;
  EXPECT_THAT(message_of<TypeError>([&] { tree_to<Wanted>(tree); }),
              HasSubstr("args[1]['mask'][1]: got the string 'two', expected an int"));
  EXPECT_THAT(message_of<TypeError>([&] { tree_to<std::vector<at::Tensor>>(tree, "kwargs"); }),
              HasSubstr("kwargs[1]: got a dictionary with key 'mask', expected a tensor"));
  EXPECT_THAT(message_of<TypeError>([&] { tree_to<std::tuple<Tree>>(tree); }),
              HasSubstr("args: got a tuple of 2, expected a tuple of 1"));
  EXPECT_THAT(message_of<TypeError>([&] { tree_to<std::int8_t>(Tree(200)); }), HasSubstr("the int 200"));
  EXPECT_THROW(tree_to<bool>(Tree(1)), TypeError);
  EXPECT_THROW(tree_to<std::string>(Tree()), TypeError);
  EXPECT_THROW((tree_to<std::map<std::string, int>>(Tree::list({}))), TypeError);
  EXPECT_THROW(tree_to<double>(Tree("1")), TypeError);
}

TEST(TreeIValue, RoundTrip) {
  const at::Tensor x = at::ones({2});
  const c10::IValue device(at::Device(at::kCPU));
  const Tree tree = Tree::tuple({x, Tree::dict({{"z", 1}, {"a", Tree::list({x, x})}}), Tree::list({1, 2}),
                                 Tree::list({1, "x"}), Tree::list({}), Tree::list({true}), Tree::list({0.5}),
                                 Tree::list({"t"}), 0.5, true, "s", Tree(), Tree::object(device)});
  const c10::IValue value = tree_to_ivalue(tree);
  EXPECT_TRUE(same(tree_from_ivalue(value), tree)) << tree_from_ivalue(value).to_string();
  const std::vector<c10::IValue> elements = value.toTupleRef().elements().vec();
  EXPECT_TRUE(elements[1].toGenericDict().at("a").isTensorList());
  EXPECT_TRUE(elements[2].isIntList());
  EXPECT_TRUE(elements[5].isBoolList());
  EXPECT_TRUE(elements[6].isDoubleList());
  EXPECT_TRUE(elements[12].isDevice());
  EXPECT_EQ(tree_from_ivalue(elements[12]).kind(), Tree::Kind::Object);
}

TEST(TreeIValue, ADictionaryWithOtherKeysIsNamed) {
  c10::impl::GenericDict numbers(c10::IntType::get(), c10::AnyType::get());
  numbers.insert(1, at::ones({1}));
  const c10::IValue value = c10::ivalue::Tuple::create({c10::IValue(1), c10::IValue(numbers)});
  EXPECT_THAT(message_of<TypeError>([&] { tree_from_ivalue(value, "output"); }),
              HasSubstr("output[1]: got a dictionary with keys of type Int"));
}

#ifdef PENSTOCK_HAVE_RAPIDCHECK

rc::Gen<Tree> arbitrary_leaf() {
  return rc::gen::oneOf(
      rc::gen::just(Tree()), rc::gen::map(rc::gen::arbitrary<bool>(), [](bool b) { return Tree(b); }),
      rc::gen::map(rc::gen::arbitrary<std::int64_t>(), [](std::int64_t n) { return Tree(n); }),
      rc::gen::map(rc::gen::arbitrary<int>(), [](int n) { return Tree(n / 8.0); }),
      rc::gen::map(rc::gen::arbitrary<std::string>(), [](std::string s) { return Tree(std::move(s)); }),
      rc::gen::map(rc::gen::inRange(0, 4), [](int n) { return Tree(at::zeros({n})); }));
}

rc::Gen<Tree> arbitrary_tree(int depth) {
  if (depth == 0) return arbitrary_leaf();
  return rc::gen::exec([depth] {
    // `element`, not `inRange` or a smaller size: those would make the inner levels leaves nearly always.
    const int kind = *rc::gen::element(0, 1, 2, 3);
    if (kind == 0) return *arbitrary_leaf();
    std::vector<Tree> entries;
    for (int count = *rc::gen::element(0, 1, 2, 3); count > 0; --count)
      entries.push_back(*arbitrary_tree(depth - 1));
    if (kind == 1) return Tree::tuple(entries);
    if (kind == 2) return Tree::list(entries);
    std::vector<Tree::Item> items;
    for (const Tree& entry : entries)
      items.emplace_back(*rc::gen::arbitrary<std::string>() + std::to_string(items.size()), entry);
    return Tree::dict(std::move(items));
  });
}

RC_GTEST_PROP(TreeProperty, FlattenAndBack, ()) {
  const Tree tree = *arbitrary_tree(3);
  const auto [leaves, spec] = flatten_tree(tree);
  RC_CLASSIFY(leaves.size() > 3);
  RC_ASSERT(leaves.size() == spec.leaf_count());
  RC_ASSERT(spec.leaf_paths().size() == spec.leaf_count());
  RC_ASSERT(same(unflatten_tree(leaves, spec), tree));
  RC_ASSERT(same(map_tree(tree, [](const Tree& leaf) { return leaf; }), tree));
  RC_ASSERT(TreeSpec(unflatten_tree(std::vector<Tree>(leaves.size(), Tree(0)), spec)) == spec);
}

RC_GTEST_PROP(TreeProperty, SpecsAreEqualExactlyWhenTheirTextsAre, ()) {
  const TreeSpec a(*arbitrary_tree(2));
  const TreeSpec b(*arbitrary_tree(2));
  RC_CLASSIFY(a == b);
  RC_ASSERT((a == b) == (a.to_string() == b.to_string()));
  RC_ASSERT((a == b) == !first_difference(a, b));
  if (a == b) RC_ASSERT(a.hash() == b.hash());
}

RC_GTEST_PROP(TreeProperty, IValueAndBack, ()) {
  const Tree tree = *arbitrary_tree(3);
  RC_ASSERT(same(tree_from_ivalue(tree_to_ivalue(tree)), tree));
}

#endif

}  // namespace pytree_test
}  // namespace penstock
