// Divides C++ text into tokens, byte by byte: the class of a byte depends on it and on the bytes before it
// only. A model may therefore be told the class of what it reads without being told what follows.
//
//   CppLexer lexer;
//   for (const unsigned char byte : text) {
//     const CppLexer::Step step = lexer.next(byte);
//     step.type;          // of this byte: CppToken::Comment, ...
//     step.ended_word;    // the word before this byte is complete: word_hash(), keyword()
//   }
//
// A word counts as an identifier until what has been read of it is a keyword: in "inter" the third byte is
// one, because it ends "int". The first byte of a comment is an operator: it may be a division.
//
// Any bytes are accepted. A string that is not terminated ends with its line, a comment with the text. Bytes
// from 0x80 are part of words, whether they are valid UTF-8 or not; control characters end tokens. A
// backslash before the end of a line, also of one that ends in CR LF, continues directives, comments and
// strings. Digraphs are operators, and words are not continued over lines.
//
// Constant memory, linear time. Copies continue independently.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace penstock::train {

// Classes of bytes, as ids of node types.
enum class CppToken : std::uint8_t {
  Whitespace,
  Identifier,
  Keyword,
  Number,
  String,
  Character,  // a character literal
  Escape,     // an escape sequence in a string or character
  Comment,
  Directive,   // # and the name of a preprocessor directive
  HeaderName,  // <vector> after #include
  Operator,
  Separator,  // , and ;
  OpenBracket,
  CloseBracket,
  Other,  // a control character, or a backslash outside of literals
  EndOfDocument,
};
inline constexpr int kCppTokens = 16;

// Groups of keywords that matter for structure.
enum class CppKeyword : std::uint8_t {
  None,  // not a keyword
  Namespace,
  Type,  // class, struct, union
  Enum,
  Control,  // followed by a condition: if, for, while, switch, catch
  Block,    // followed by a block: else, do, try
  Access,   // public, protected, private
  Template,
  Operator,
  Extern,
  Qualifier,  // may be between parameters and body: const, volatile, noexcept
  Plain,      // any other
};

// FNV-1a of a word, never 0.
constexpr std::uint32_t extended_word_hash(std::uint32_t hash, unsigned char byte) {
  const std::uint32_t next = (hash ^ byte) * 16777619U;
  return next == 0 ? 1 : next;
}
inline constexpr std::uint32_t kEmptyWordHash = 2166136261U;
constexpr std::uint32_t word_hash_of(std::string_view word) {
  std::uint32_t hash = kEmptyWordHash;
  for (const char each : word) hash = extended_word_hash(hash, static_cast<unsigned char>(each));
  return hash;
}

class CppLexer {
 public:
  struct Step {
    CppToken type = CppToken::Whitespace;
    bool ended_word = false;
  };
  Step next(unsigned char byte);

  // Of the word that is being read, or that has ended last.
  std::uint32_t word_hash() const { return word_hash_; }
  CppKeyword keyword() const;

  // Whether the last byte is part of a preprocessor directive, and whether the last word is its name.
  bool in_directive() const { return directive_ != DirectivePart::None; }
  bool word_is_directive_name() const { return word_is_directive_name_; }

 private:
  enum class Mode : std::uint8_t {
    Code,
    Word,
    Number,
    String,
    Character,
    RawDelimiter,
    RawText,
    LineComment,
    BlockComment,
    HeaderName
  };
  enum class DirectivePart : std::uint8_t { None, BeforeName, Name, AfterName };

  CppToken in_code(unsigned char byte);
  CppToken in_literal(unsigned char byte, char quote, CppToken type);
  CppToken in_raw_delimiter(unsigned char byte);
  void in_raw_text(unsigned char byte);
  CppToken end_of_line();
  CppToken begin_word(unsigned char byte);
  void extend_word(unsigned char byte);
  CppToken word_type() const;
  void end_word();
  bool continues_line(unsigned char byte) const { return backslash_ && (byte == '\n' || byte == '\r'); }

  static constexpr int kMaxRawDelimiter = 16;  // [lex.string]

  Mode mode_ = Mode::Code;
  DirectivePart directive_ = DirectivePart::None;
  unsigned char previous_ = 0;
  bool at_line_start_ = true;  // only white space in this line so far
  bool backslash_ = false;     // the previous byte, or the one before a CR
  bool escape_ = false;        // the next byte of a literal belongs to an escape sequence
  bool slash_ = false;         // the previous byte may begin a comment
  bool word_is_directive_name_ = false;
  bool after_include_ = false;
  std::uint16_t keyword_state_ = 0;
  std::uint32_t word_hash_ = kEmptyWordHash;
  std::int8_t raw_size_ = 0;
  std::int8_t raw_matched_ = -1;  // bytes of the delimiter after a ')'; -1: there was none
  std::array<char, kMaxRawDelimiter> raw_delimiter_{};
};

}  // namespace penstock::train
