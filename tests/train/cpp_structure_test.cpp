// The structure of C++ text: classes of bytes, brackets, kinds, places and levels, on ordinary and on odd
// input.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/errors.h"
#include "penstock/train/data/byte_tokenizer.h"
#include "penstock/train/data/cpp_structure.h"
#include "penstock/train/data/make_shards.h"
#include "penstock/train/data/sampler.h"
#include "penstock/train/data/structure_reader.h"
#include "penstock/train/data/token_source.h"
#include "tests/has_text.h"
#include "tests/throws.h"
#include "tests/train/scratch_folder.h"

namespace penstock::train {
namespace cpp_structure_test {

using test::has_text;
using test::message_of;
using test::ScratchFolder;

std::vector<std::int64_t> tokens_of(std::string_view text) {
  std::vector<std::int64_t> tokens;
  for (const std::uint32_t token : byte_tokenizer::encode(text)) tokens.push_back(token);
  return tokens;
}

std::vector<TokenStructure> structure_of(const std::vector<std::int64_t>& tokens) {
  CppStructure structure;
  std::vector<TokenStructure> found(tokens.size());
  structure.read(tokens, found);
  return found;
}
std::vector<TokenStructure> structure_of(std::string_view text) { return structure_of(tokens_of(text)); }

// One letter for the class of each byte.
std::string classes_of(std::string_view text) {
  std::string letters;
  for (const TokenStructure& each : structure_of(text)) letters += " iknscexdho,()?$"[each.node];
  return letters;
}
// One letter for the kind of each byte: File, Namespace, Type, Enumeration, fUnction, Block, Initializer,
// Parameters, Arguments, Condition, Group, Subscript, tEmplate, #, comment, literal.
std::string kinds_of(std::string_view text) {
  std::string letters;
  for (const TokenStructure& each : structure_of(text)) letters += ".NTEUBIPACGSM#/\""[each.kind];
  return letters;
}
// One digit each.
std::string depths_of(std::string_view text) {
  std::string digits;
  for (const TokenStructure& each : structure_of(text)) digits += static_cast<char>('0' + each.depth);
  return digits;
}
std::string siblings_of(std::string_view text) {
  std::string digits;
  for (const TokenStructure& each : structure_of(text)) digits += static_cast<char>('0' + each.sibling);
  return digits;
}
// The level of the byte before the end of each line.
std::vector<int> levels_of(const std::string& text) {
  const std::vector<TokenStructure> found = structure_of(text);
  std::vector<int> levels;
  for (std::size_t i = 1; i < text.size(); ++i)
    if (text[i] == '\n') levels.push_back(found[i - 1].level);
  return levels;
}

struct Lexed {
  std::string_view text, classes;
};

TEST(CppLexer, ClassesOfBytes) {
  const Lexed cases[] = {
      // An identifier is one until what has been read of it is a keyword.
      {"int inter = 0x1F'00u;", "iik iikii o nnnnnnnn,"},
      {"1e+5+1.5f .5", "nnnnonnnn on"},
      {"f(\"a\\\"b\\n\", 'c');\n", "i(sseesees, ccc), "},
      {"'\\''x", "ceeci"},
      // A slash is an operator until the next byte makes it a comment.
      {"a/b//c\nd", "ioioxx i"},
      {"/*/ x */y", "oxxxxxxxi"},
      {"#include <a/b> // c\nx", "dddddddd hhhhh oxxx i"},
      {"a # b", "i o i"},
      {"a%:b<:c", "iooiooi"},
  };
  for (const Lexed& each : cases) EXPECT_EQ(classes_of(each.text), each.classes) << each.text;
}

TEST(CppLexer, RawStrings) {
  const Lexed cases[] = {
      {"R\"x(a)\" )y\" )x\";z", "issssssssssssss,i"},
      {"u8R\"(a)\"b", "iiisssssi"},
      {"R\"(\n\\\n)\"b", "isssssssi"},
      {"R\"((a))\"b", "isssssssi"},
      {"xR\"(a\"b", "iissssi"},                                // not a prefix: an ordinary string
      {"R\"a b(\"c", "issssssi"},                              // not a delimiter
      {"R\"0123456789abcdefg(\"c", "issssssssssssssssssssi"},  // too long to be one
      {"R\"(never closed\n", "isssssssssssssss"},
  };
  for (const Lexed& each : cases) EXPECT_EQ(classes_of(each.text), each.classes) << each.text;
}

TEST(CppLexer, OddInput) {
  const Lexed cases[] = {
      {"\"open\nint", "sssss iik"},                                   // ends with its line
      {"'open\nint", "ccccc iik"},       {"\"a\\\nb\"c", "sseessi"},  // continued
      {"\"a\\\r\nb\"c", "sseeessi"},     {"//a\\\nb\nc", "oxxxxx i"},
      {"//a\\\r\nb\r\nc", "oxxxxxxx i"}, {"#define A \\\r\n B\r\nC", "ddddddd i ?   i  i"},
      {"/* open\n", "oxxxxxxx"},         {"\xff\xfe x", "ii i"},  // not UTF-8
  };
  for (const Lexed& each : cases) EXPECT_EQ(classes_of(each.text), each.classes) << each.text;
  EXPECT_EQ(classes_of(std::string_view("a\0b\x01", 4)), "i?i?");
  EXPECT_EQ(classes_of(""), "");
}

TEST(CppStructure, KindsOfBrackets) {
  const std::pair<std::string_view, std::string_view> cases[] = {
      {"namespace a { int b; }", ".............NNNNNNNNN"},
      {"namespace a::b { x }", "................NNNN"},
      {"extern \"C\" { x }", ".......\"\"\"..NNNN"},
      {"class A : public B { x };", "....................TTTT."},
      {"enum class E : int { A, B };", "....................EEEEEEE."},
      {"int f(int a) { return g(a); }", "......PPPPPP..UUUUUUUUUUAAUUU"},
      {"int f() const noexcept { x }", "......P.................UUUU"},
      {"struct A* f() { x }", "............P..UUUU"},
      {"auto f() -> int { x }", ".......P.........UUUU"},
      {"A::A() : a{1}, b(2) { x }", ".....P.....II....PP..UUUU"},
      {"int a[3] = {1, 2};", "......SS....IIIII."},
      {"template <class T, int N> class A { };", "..........MMMMMMMMMMMMMMM..........TT."},
      {"template <class T = A<int>> void f(T) { }", "..........MMMMMMMMMMMMMMMMM........PP..UU"},
      {"void f() { if (a < b) { x } else { y } }", ".......P..UUUUUCCCCCCUUBBBBUUUUUUUBBBBUU"},
      {"void f() { g([](int a) { b; }, {1}); }", ".......P..UUUASAAAAAAAAABBBBBAAAIIAUUU"},
      {"#define A(x) { x\nint b; // {\n", "################.........///."},
      {"f({\"{\"}, '{')", "..P\"\"\"IPP\"\"\"P"},
  };
  for (const auto& [text, kinds] : cases) {
    EXPECT_EQ(kinds_of(text), kinds) << text;
  }
}

TEST(CppStructure, DepthsAndBracketsThatDoNotMatch) {
  EXPECT_EQ(depths_of("a{b(c)d}e"), "001122110");
  EXPECT_EQ(depths_of("a)b}c]d"), "0000000") << "closing brackets without opening ones are ignored";
  EXPECT_EQ(depths_of("{([a}b"), "012310") << "a brace closes what was left open inside";
  EXPECT_EQ(depths_of("{(]a)}b"), "0122210");
  EXPECT_EQ(depths_of("template <a; b"), "00000000001000") << "a semicolon ends a list of parameters";
  EXPECT_EQ(depths_of("a < b > c"), "000000000") << "operators";
  // The branches of a conditional begin at the same depth.
  EXPECT_EQ(depths_of("#if A\nf {\n#else\ng {\n#endif\nx}y"), "000000000111111000011111111110");
  const TokenStructure end = structure_of({'{', '{', 256, 'a'})[2],
                       after = structure_of({'{', '{', 256, 'a'})[3];
  EXPECT_EQ(static_cast<CppToken>(end.node), CppToken::EndOfDocument);
  EXPECT_EQ(end.depth, 0);
  EXPECT_EQ(after, structure_of("a")[0]) << "a new document";
}

TEST(CppStructure, PlacesAmongSiblings) {
  EXPECT_EQ(siblings_of("a; b; c"), "0011122");
  EXPECT_EQ(siblings_of("f(a, b, (c))g"), "0000111220020");
  EXPECT_EQ(siblings_of("void f() { a, b; {} c; } d"), "00000000000000001102223311");
  const std::vector<TokenStructure> found = structure_of("a{b{c}d}");
  EXPECT_EQ(found[0].parent_distance, 0U);
  EXPECT_EQ(found[1].parent_distance, 0U) << "an opening bracket belongs to what is around it";
  EXPECT_EQ(found[4].parent_distance, 1U);
  EXPECT_EQ(found[5].parent_distance, 2U) << "a closing one to what it closes";
  EXPECT_EQ(found[6].parent_distance, 5U);
}

TEST(CppStructure, LevelsOfDefinitions) {
  EXPECT_EQ(levels_of("struct A { int a; };\n"
                      "struct B { A a; };\n"
                      "B make(int);\n"
                      "int other();\n"
                      "int both() { return make(1) + other(); }\n"),
            (std::vector<int>{0, 1, 2, 0, 3}));
  EXPECT_EQ(levels_of("void f(int);\nvoid f(long);\nvoid f(char);\n"), (std::vector<int>{0, 0, 0}))
      << "a declaration does not use its own name";
  EXPECT_EQ(levels_of("#define M 1\nint a = M;\nint b = a;\n"), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(levels_of("int a;\nint f() {\n  int b;\n  b = a;\n  return b;\n}\nint c = b;\n"),
            (std::vector<int>{0, 0, 0, 1, 1, 1, 0}))
      << "what has been used so far; local names define nothing";
  std::string chain = "int v0;\n";
  for (int i = 1; i < 400; ++i) chain += "int v" + std::to_string(i) + " = v" + std::to_string(i - 1) + ";\n";
  EXPECT_EQ(levels_of(chain).back(), 255);
}

TEST(CppStructure, NamesAreEqualAsFarAsTheyAreRead) {
  const std::vector<TokenStructure> found = structure_of("value = vale + int(value);");
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(found[i].name, found[8 + i].name);
  EXPECT_NE(found[3].name, found[11].name);
  EXPECT_EQ(found[4].name, found[23].name);
  EXPECT_EQ(found[6].name, 0U);
  EXPECT_EQ(found[17].name, 0U) << "a keyword";
}

// Text of all kinds of pieces, valid and not.
std::string random_text(std::mt19937& random, std::size_t pieces) {
  static const std::vector<std::string> kPieces = {
      "{",          "}",          "(",       ")",          "[",
      "]",          "<",          ">",       ";",          ",",
      ":",          "::",         "=",       "\"",         "'",
      "\\",         "\n",         "\r\n",    " ",          "/*",
      "*/",         "//",         "#if x\n", "#else\n",    "#endif\n",
      "#define a ", "#include <", "R\"a(",   ")a\"",       "template ",
      "class ",     "struct ",    "enum ",   "namespace ", "operator",
      "if ",        "else ",      "const ",  "public:",    "extern ",
      "x",          "yy",         "1.5e+3",  "0'1",        std::string(1, '\0'),
      "\xc3\xa9",   "\xff"};
  std::string text;
  for (std::size_t i = 0; i < pieces; ++i) text += kPieces[random() % kPieces.size()];
  return text;
}

void expect_in_range(const std::vector<TokenStructure>& found) {
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_LT(found[i].kind, kCppKinds);
    ASSERT_LT(found[i].node, kCppTokens);
    ASSERT_LE(found[i].level, CppStructure::kMaxLevel + 1);
    ASSERT_LE(found[i].parent_distance, i);
    ASSERT_LE(found[i].depth, i);
    ASSERT_EQ(found[i].depth > 0, found[i].parent_distance > 0);
  }
}

TEST(CppStructureProperty, AnyTextInAnyPartsAndPrefixes) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::int64_t> tokens;
    if (round % 3 == 0)
      for (int i = 0; i < 500; ++i) tokens.push_back(random() % 258);  // bytes, ends, a token above them
    else
      tokens = tokens_of(random_text(random, 200));
    const std::vector<TokenStructure> whole = structure_of(tokens);
    expect_in_range(whole);
    // In parts, with copies of the state.
    CppStructure state;
    std::vector<TokenStructure> parts(tokens.size());
    for (std::size_t begin = 0; begin < tokens.size();) {
      const std::size_t count = std::min<std::size_t>(1 + random() % 40, tokens.size() - begin);
      CppStructure copy = state;
      copy.read(std::span(tokens).subspan(begin, count), std::span(parts).subspan(begin, count));
      state.read(std::span(tokens).subspan(begin, count), {});
      begin += count;
    }
    ASSERT_TRUE(parts == whole) << round;
    // What follows does not matter.
    const std::size_t cut = random() % (tokens.size() + 1);
    std::vector<std::int64_t> other(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(cut));
    for (const std::int64_t token : tokens_of(random_text(random, 20))) other.push_back(token);
    const std::vector<TokenStructure> changed = structure_of(other);
    ASSERT_TRUE(std::equal(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(cut), changed.begin()));
  }
}

// Time that grew with the depth or with what is unclosed would make this test take minutes.
TEST(CppStructure, DeepAndUnclosedTextTakesLinearTimeAndBoundedMemory) {
  constexpr std::size_t kBytes = 1 << 20;
  for (const char* each : {"(", "{", "template <", "(}", "{)", "#if\n(", "\"", "R\"(", "/*", "x", ")"}) {
    std::string text;
    while (text.size() < kBytes) text += each;
    text += std::string(kBytes / 4, '}') + std::string(kBytes / 4, ')');
    CppStructure state;
    std::vector<TokenStructure> found(text.size());
    state.read(tokens_of(text), found);
    expect_in_range(found);
    EXPECT_LT(state.bytes(), 64U << 10) << each;
  }
  EXPECT_EQ(structure_of(std::string(100000, '(')).back().depth, 65535);
  const std::vector<TokenStructure> back =
      structure_of(std::string(5000, '(') + std::string(4998, ')') + "xx");
  EXPECT_EQ(back.back().depth, 2) << "brackets past the limit are counted";
}

// A source of one document of tokens.
class OneDocument : public TokenSource {
 public:
  explicit OneDocument(std::vector<std::int64_t> tokens) : tokens_(std::move(tokens)) {}
  const std::string& name() const override { return name_; }
  std::uint64_t tokens() const override { return tokens_.size(); }
  std::uint64_t vocabulary() const override { return byte_tokenizer::kVocabulary; }
  std::optional<std::uint32_t> end_of_document() const override { return byte_tokenizer::kEndOfDocument; }
  bool ends_are_in_tokens() const override { return false; }
  std::uint64_t documents() const override { return 1; }
  Document document(std::uint64_t) const override { return {0, tokens_.size(), 0}; }
  void read(std::uint64_t begin, std::span<std::int64_t> out) const override {
    read_ += out.size();
    std::copy_n(tokens_.begin() + static_cast<std::ptrdiff_t>(begin), out.size(), out.begin());
  }
  void verify() const override {}
  std::uint64_t fingerprint() const override { return 0; }
  std::uint64_t read_tokens() const { return read_; }

 private:
  std::string name_ = "one";
  std::vector<std::int64_t> tokens_;
  mutable std::uint64_t read_ = 0;
};

TEST(StructureReader, PartsOfDocumentsInAnyOrder) {
  std::mt19937 random(2);
  std::vector<std::unique_ptr<OneDocument>> documents;
  std::vector<std::vector<TokenStructure>> whole;
  for (int i = 0; i < 5; ++i) {
    const std::vector<std::int64_t> tokens = tokens_of(random_text(random, 3000));
    documents.push_back(std::make_unique<OneDocument>(tokens));
    whole.push_back(structure_of(tokens));
  }
  for (const std::size_t bytes : {std::size_t{1} << 20, std::size_t{60000}, std::size_t{0}}) {
    StructureReader reader({.interval = 100, .states_per_document = 7, .max_bytes = bytes});
    for (int round = 0; round < 400; ++round) {
      const std::size_t d = random() % documents.size();
      const std::uint64_t begin = random() % whole[d].size(),
                          count = std::min<std::uint64_t>(1 + random() % 64, whole[d].size() - begin);
      std::vector<TokenStructure> found(count);
      reader.read({documents[d].get(), 0, begin, count}, found);
      ASSERT_TRUE(
          std::equal(found.begin(), found.end(), whole[d].begin() + static_cast<std::ptrdiff_t>(begin)));
      // The document that is read may be the only one that is kept.
      ASSERT_LT(reader.kept_bytes(), std::max<std::size_t>(bytes, 60000) + 1000);
    }
  }
}

TEST(StructureReader, AKnownDocumentIsNotReadAgain) {
  std::string text;
  while (text.size() < 100000) text += "int f(int a) { return a; }\n";
  const OneDocument document(tokens_of(text));
  StructureReader reader({.interval = 1000});
  std::vector<TokenStructure> found(10);
  reader.read({&document, 0, 99000, 10}, found);
  const std::uint64_t first = document.read_tokens();
  for (std::uint64_t begin = 0; begin < 99000; begin += 3000)
    reader.read({&document, 0, begin + 999, 10}, found);
  EXPECT_LE(document.read_tokens() - first, 33U * 1010U);
  EXPECT_TRUE(has_text(message_of<ValueError>([&] { reader.read({&document, 0, 0, 3}, found); }), "3"));
}

TEST(SamplerStructure, IsThatOfTheWholeDocument) {
  const ScratchFolder folder;
  std::vector<std::string> texts;
  for (int i = 0; i < 6; ++i) {
    std::string text = "namespace n" + std::to_string(i) + " {\n";
    for (int line = 0; line < 5 + i; ++line) text += "int f" + std::to_string(line) + "(int a) { g(a); }\n";
    texts.push_back(text + "}\n");
    folder.write("text/" + std::to_string(i) + ".h", texts.back());
  }
  MakeShardsOptions options;
  options.sources.paths = {folder / "text"};
  make_shards(folder / "shards", options);
  std::vector<TokenStructure> all;
  for (const std::string& text : texts) {
    std::vector<std::int64_t> tokens = tokens_of(text);
    tokens.push_back(byte_tokenizer::kEndOfDocument);
    for (const TokenStructure& each : structure_of(tokens)) all.push_back(each);
  }
  const Sampler sampler(TokenDataset::open(folder / "shards", DataSplit::All, 0),
                        {.context = 48, .seed = 3, .cpp_structure = true});
  Batch batch;
  sampler.fill(0, static_cast<std::int64_t>(2 * sampler.samples_per_epoch()), batch);
  ASSERT_EQ(batch.structure.size(), batch.tokens.size());
  for (std::size_t i = 0; i < batch.structure.size(); ++i) {
    const std::uint64_t place = (sampler.first_token(i / 48) + i % 48) % all.size();
    ASSERT_EQ(batch.structure[i], all[place]) << i;
  }
}

// One document: its last tokens are for validation.
TEST(SamplerStructure, ADocumentThatIsCutIsKnownFromItsBeginning) {
  const ScratchFolder folder;
  std::string text = "namespace a {\nvoid f() {\n";
  for (int line = 0; line < 40; ++line) text += "  g(" + std::to_string(line) + ");\n";
  folder.write("text/a.h", text);
  MakeShardsOptions options;
  options.sources.paths = {folder / "text"};
  make_shards(folder / "shards", options);
  const auto validation = TokenDataset::open(folder / "shards", DataSplit::Validation, 0.25);
  ASSERT_LT(validation->tokens(), text.size() / 2);
  const Sampler sampler(validation, {.context = 32, .shuffle = false, .cpp_structure = true});
  std::vector<TokenStructure> found(32);
  sampler.structure(1, found);
  std::vector<std::int64_t> tokens = tokens_of(text);
  tokens.push_back(byte_tokenizer::kEndOfDocument);
  const std::vector<TokenStructure> whole = structure_of(tokens);
  const std::size_t begin = tokens.size() - validation->tokens() + 32;
  EXPECT_TRUE(std::equal(found.begin(), found.end(), whole.begin() + static_cast<std::ptrdiff_t>(begin)));
  EXPECT_EQ(static_cast<CppKind>(found[0].kind), CppKind::Function);
  EXPECT_GT(found[0].sibling, 10U);
  EXPECT_THROW((void)validation->parts(1, validation->tokens()), ValueError);
}

TEST(SamplerStructure, WhatIsRefused) {
  const ScratchFolder folder;
  folder.write("text/a.h", std::string(300, 'a'));
  MakeShardsOptions options;
  options.sources.paths = {folder / "text"};
  make_shards(folder / "shards", options);
  const auto data = TokenDataset::open(folder / "shards", DataSplit::All, 0);
  std::vector<TokenStructure> found(16);
  EXPECT_THROW(Sampler(data, {.context = 16}).structure(0, found), StateError);
  EXPECT_THROW(Sampler(data, {.context = 17, .cpp_structure = true}).structure(0, found), ValueError);
}

}  // namespace cpp_structure_test
}  // namespace penstock::train
