// Finds the structure of C++ text: for each byte its nesting depth, what it is part of, and its place there.
//
//   CppStructure structure;
//   std::vector<TokenStructure> found(tokens.size());
//   structure.read(tokens, found);              // byte tokens (byte_tokenizer.h), a document or a part of it
//
// Text may be read in parts of any size: the result is that of the whole. An end of document begins a new
// one.
//
// This is a lexer with a stack of brackets, not a parser; it has to be right for most code, fast for all, and
// never wrong about what comes first: the structure of a byte depends on it and on the bytes before it only.
//
//   brackets   ( ) [ ] { }, and < > after `template`. An opening bracket belongs to what is around it, a
//   closing
//              one to what it closes. A } also closes brackets that were left open inside; a closing bracket
//              without its opening one is ignored. Brackets in directives, literals and comments do not
//              count, and the branches of an #if begin at the same depth.
//   kind       what the innermost bracket is, from the words before it (CppKind), or the directive, comment
//   or
//              literal that the byte is in.
//   sibling    in namespaces, types and blocks: statements before it, ended by ; or a block; elsewhere also
//              elements, ended by commas.
//   level      of the definition (of a type, function, variable or alias in a namespace or type) that the
//   byte
//              is in: one more than the highest level of the document's earlier definitions that it has used
//              so far; 0: none. Names are looked up as they are written, without regard to their scope; a
//              document with very many names forgets some of them.
//   name       identifiers in code, so that uses of a name can be related.
//
// Linear time; memory is bounded (about 40 KB): brackets deeper than kMaxDepth only count. Copies continue
// independently.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "penstock/train/data/cpp_lexer.h"
#include "penstock/train/data/token_structure.h"

namespace penstock::train {

// What a byte is part of, as ids of structure kinds.
enum class CppKind : std::uint8_t {
  File,  // outside of everything
  Namespace,
  Type,         // the body of a class, struct or union
  Enumeration,  // the body of an enum
  Function,     // the body of a function
  Block,        // inside a function, and bodies of lambdas
  Initializer,  // other braces
  Parameters,   // parentheses after a name, outside of functions
  Arguments,    // parentheses after a name, inside functions
  Condition,    // parentheses after if, for, while, switch, catch
  Group,        // other parentheses
  Subscript,    // square brackets
  Template,     // < > after template
  Directive,
  Comment,
  Literal,
};
inline constexpr int kCppKinds = 16;

class CppStructure {
 public:
  static constexpr std::size_t kMaxDepth = 1024;  // brackets whose kind is known
  static constexpr std::uint16_t kMaxLevel = 254;

  CppStructure();

  // Reads the next tokens of the text. `found` has the size of `tokens`, or is empty: then only the state
  // advances. Tokens above 256 count as control characters.
  void read(std::span<const std::int64_t> tokens, std::span<TokenStructure> found);

  // Bytes of memory that a copy takes.
  std::size_t bytes() const;

 private:
  // The last token of code in a bracket.
  enum class Last : std::uint8_t {
    None,
    Name,
    Word,  // a keyword without a group of its own
    TypeWord,
    ControlWord,
    BlockWord,
    AccessWord,
    TemplateWord,
    OperatorWord,
    Qualifier,
    Value,  // a number or literal
    Operator,
    Assignment,
    Colon,
    Comma,
    Parentheses,  // closed ones
    Square,
    Angle,
    Braces,
  };
  // What the current statement of a bracket has had so far.
  enum HeadFlag : std::uint8_t {
    kNamespaceWord = 1,
    kTypeWord = 2,
    kEnumWord = 4,
    kExternWord = 8,
    kParentheses = 16,
    kAssignment = 32,
    kInitializers = 64,  // a colon after parentheses: members of a constructor
    kNamed = 128,        // `name` is that of the definition
  };
  struct Frame {
    std::uint64_t opened = 0;   // position of the bracket
    std::uint32_t sibling = 0;  // of the current element
    std::uint32_t name = 0;     // hash of the name that the current statement may define; 0: none
    std::uint16_t scope = 0;   // index of the frame whose definitions this one is part of; own: it is a scope
    std::uint8_t level = 0;    // of the current definition, in a scope
    std::uint8_t highest = 0;  // level of the definitions before it
    CppKind kind = CppKind::File;
    char bracket = 0;  // 0: the document
    std::uint8_t head = 0;
    Last last = Last::None;
  };

  void begin_document();
  void next(unsigned char byte, TokenStructure& found);
  void describe_byte(CppToken type, TokenStructure& found) const;
  void in_code(unsigned char byte, CppToken& type, TokenStructure& found);
  void end_word();
  void end_directive_name();
  void on_keyword(CppKeyword keyword);
  void on_name(std::uint32_t hash);
  void on_operator(unsigned char byte);
  void on_separator(unsigned char byte);
  void open(char bracket, CppKind kind);
  void open_code_bracket(unsigned char byte);
  // Drops unclosed brackets above the one that is closed. Returns whether there is one.
  bool find_opening(unsigned char byte);
  void close();
  void drop_angles();
  void drop_to(std::size_t frames);
  void end_statement(Frame& frame);
  void resolve_colon();
  CppKind kind_of_braces() const;
  CppKind kind_of_parentheses() const;
  bool is_scope(const Frame& frame) const { return &frame == &frames_[frame.scope]; }

  std::uint8_t level_of(std::uint32_t name) const;  // 1 + its level; 0: unknown
  void define(std::uint32_t name, std::uint8_t level);

  static constexpr std::size_t kNames = 1024;
  static constexpr std::size_t kMaxConditionals = 64;

  CppLexer lexer_;
  std::uint64_t position_ = 0;
  std::vector<Frame> frames_;
  std::uint64_t beyond_ = 0;                 // open brackets past kMaxDepth
  std::uint32_t braces_ = 0;                 // frames that are {
  bool defines_macro_ = false;               // the next word is the name of a macro
  bool colon_ = false;                       // the last byte of code is a colon, which may become ::
  unsigned char last_operator_ = 0;          // the byte before, if it is an operator
  std::vector<std::uint16_t> conditionals_;  // frames at each open #if
  std::uint64_t conditionals_beyond_ = 0;
  std::array<std::uint32_t, kNames> names_{};  // 24 bits of the hash, 8 bits of 1 + level; 0: empty
};

}  // namespace penstock::train
