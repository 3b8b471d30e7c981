#include "penstock/train/data/cpp_lexer.h"

#include <cstddef>
#include <string_view>
#include <utility>

namespace penstock::train {
namespace {

constexpr std::pair<std::string_view, CppKeyword> kCppKeywords[] = {
    {"alignas", CppKeyword::Plain},
    {"alignof", CppKeyword::Plain},
    {"asm", CppKeyword::Plain},
    {"auto", CppKeyword::Plain},
    {"bool", CppKeyword::Plain},
    {"break", CppKeyword::Plain},
    {"case", CppKeyword::Plain},
    {"catch", CppKeyword::Control},
    {"char", CppKeyword::Plain},
    {"char8_t", CppKeyword::Plain},
    {"char16_t", CppKeyword::Plain},
    {"char32_t", CppKeyword::Plain},
    {"class", CppKeyword::Type},
    {"concept", CppKeyword::Plain},
    {"const", CppKeyword::Qualifier},
    {"consteval", CppKeyword::Plain},
    {"constexpr", CppKeyword::Plain},
    {"constinit", CppKeyword::Plain},
    {"const_cast", CppKeyword::Plain},
    {"continue", CppKeyword::Plain},
    {"co_await", CppKeyword::Plain},
    {"co_return", CppKeyword::Plain},
    {"co_yield", CppKeyword::Plain},
    {"decltype", CppKeyword::Plain},
    {"default", CppKeyword::Plain},
    {"delete", CppKeyword::Plain},
    {"do", CppKeyword::Block},
    {"double", CppKeyword::Plain},
    {"dynamic_cast", CppKeyword::Plain},
    {"else", CppKeyword::Block},
    {"enum", CppKeyword::Enum},
    {"explicit", CppKeyword::Plain},
    {"extern", CppKeyword::Extern},
    {"false", CppKeyword::Plain},
    {"float", CppKeyword::Plain},
    {"for", CppKeyword::Control},
    {"friend", CppKeyword::Plain},
    {"goto", CppKeyword::Plain},
    {"if", CppKeyword::Control},
    {"inline", CppKeyword::Plain},
    {"int", CppKeyword::Plain},
    {"long", CppKeyword::Plain},
    {"mutable", CppKeyword::Qualifier},
    {"namespace", CppKeyword::Namespace},
    {"new", CppKeyword::Plain},
    {"noexcept", CppKeyword::Qualifier},
    {"nullptr", CppKeyword::Plain},
    {"operator", CppKeyword::Operator},
    {"override", CppKeyword::Qualifier},
    {"private", CppKeyword::Access},
    {"protected", CppKeyword::Access},
    {"public", CppKeyword::Access},
    {"register", CppKeyword::Plain},
    {"reinterpret_cast", CppKeyword::Plain},
    {"requires", CppKeyword::Plain},
    {"return", CppKeyword::Plain},
    {"short", CppKeyword::Plain},
    {"signed", CppKeyword::Plain},
    {"sizeof", CppKeyword::Plain},
    {"static", CppKeyword::Plain},
    {"static_assert", CppKeyword::Plain},
    {"static_cast", CppKeyword::Plain},
    {"struct", CppKeyword::Type},
    {"switch", CppKeyword::Control},
    {"template", CppKeyword::Template},
    {"this", CppKeyword::Plain},
    {"thread_local", CppKeyword::Plain},
    {"throw", CppKeyword::Plain},
    {"true", CppKeyword::Plain},
    {"try", CppKeyword::Block},
    {"typedef", CppKeyword::Plain},
    {"typeid", CppKeyword::Plain},
    {"typename", CppKeyword::Plain},
    {"union", CppKeyword::Type},
    {"unsigned", CppKeyword::Plain},
    {"using", CppKeyword::Plain},
    {"virtual", CppKeyword::Plain},
    {"void", CppKeyword::Plain},
    {"volatile", CppKeyword::Qualifier},
    {"wchar_t", CppKeyword::Plain},
    {"while", CppKeyword::Control},
};

// A tree of the keywords: state 0 is for words that are not the beginning of one, state 1 for the empty word.
class KeywordTree {
 public:
  static constexpr std::uint16_t kEmptyWord = 1;

  constexpr KeywordTree() {
    std::uint8_t columns = 0;
    for (const char each : std::string_view("abcdefghijklmnopqrstuvwxyz_12368"))
      columns_[static_cast<unsigned char>(each)] = ++columns;
    std::uint16_t states = 2;
    for (const auto& [word, keyword] : kCppKeywords) {
      std::uint16_t state = kEmptyWord;
      for (const char each : word) {
        std::uint16_t& next = after_[state][columns_[static_cast<unsigned char>(each)]];
        if (next == 0) next = states++;
        state = next;
      }
      keywords_[state] = keyword;
    }
  }

  std::uint16_t after(std::uint16_t state, unsigned char byte) const { return after_[state][columns_[byte]]; }
  CppKeyword keyword(std::uint16_t state) const { return keywords_[state]; }

 private:
  static constexpr std::size_t kStates = 512, kColumns = 33;  // a compiler error if they are too few

  std::array<std::uint8_t, 256> columns_{};  // 0: no keyword has this byte
  std::array<std::array<std::uint16_t, kColumns>, kStates> after_{};
  std::array<CppKeyword, kStates> keywords_{};
};
constexpr KeywordTree kKeywordTree;

constexpr bool is_word_start(unsigned char byte) {
  return (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z') || byte == '_' || byte == '$' ||
         byte >= 0x80;
}
constexpr bool is_digit(unsigned char byte) { return byte >= '0' && byte <= '9'; }
constexpr bool is_in_word(unsigned char byte) { return is_word_start(byte) || is_digit(byte); }

// What precedes the quote of a raw string.
bool is_raw_prefix(std::uint32_t hash) {
  return hash == word_hash_of("R") || hash == word_hash_of("LR") || hash == word_hash_of("uR") ||
         hash == word_hash_of("UR") || hash == word_hash_of("u8R");
}

bool ends_in_exponent(unsigned char previous) {
  return previous == 'e' || previous == 'E' || previous == 'p' || previous == 'P';
}

}  // namespace

CppKeyword CppLexer::keyword() const { return kKeywordTree.keyword(keyword_state_); }

CppToken CppLexer::word_type() const {
  if (directive_ == DirectivePart::Name) return CppToken::Directive;
  return keyword() == CppKeyword::None ? CppToken::Identifier : CppToken::Keyword;
}

void CppLexer::extend_word(unsigned char byte) {
  word_hash_ = extended_word_hash(word_hash_, byte);
  keyword_state_ = kKeywordTree.after(keyword_state_, byte);
}

CppToken CppLexer::begin_word(unsigned char byte) {
  mode_ = Mode::Word;
  if (directive_ == DirectivePart::BeforeName) directive_ = DirectivePart::Name;
  word_hash_ = kEmptyWordHash;
  keyword_state_ = KeywordTree::kEmptyWord;
  extend_word(byte);
  return word_type();
}

void CppLexer::end_word() {
  mode_ = Mode::Code;
  word_is_directive_name_ = directive_ == DirectivePart::Name;
  if (!word_is_directive_name_) return;
  directive_ = DirectivePart::AfterName;
  after_include_ = word_hash_ == word_hash_of("include") || word_hash_ == word_hash_of("include_next");
}

CppToken CppLexer::end_of_line() {
  mode_ = Mode::Code;
  directive_ = DirectivePart::None;
  at_line_start_ = true;
  after_include_ = false;
  escape_ = false;
  return CppToken::Whitespace;
}

CppToken CppLexer::in_literal(unsigned char byte, char quote, CppToken type) {
  if (byte == '\n' && !continues_line(byte)) return end_of_line();
  if (escape_) {
    escape_ = byte == '\r' && backslash_;  // the LF after it still belongs to the escape
    return CppToken::Escape;
  }
  if (byte == '\\') {
    escape_ = true;
    return CppToken::Escape;
  }
  if (byte == static_cast<unsigned char>(quote)) mode_ = Mode::Code;
  return type;
}

// A delimiter that cannot be one makes the literal an ordinary string.
CppToken CppLexer::in_raw_delimiter(unsigned char byte) {
  if (byte == '(') {
    mode_ = Mode::RawText;
    raw_matched_ = -1;
    return CppToken::String;
  }
  const bool is_valid = byte > ' ' && byte != ')' && byte != '\\' && byte != '"' && byte != 0x7f;
  if (!is_valid || raw_size_ == kMaxRawDelimiter) {
    mode_ = Mode::String;
    escape_ = false;
    return in_literal(byte, '"', CppToken::String);
  }
  raw_delimiter_[static_cast<std::size_t>(raw_size_++)] = static_cast<char>(byte);
  return CppToken::String;
}

void CppLexer::in_raw_text(unsigned char byte) {
  if (raw_matched_ == raw_size_ && byte == '"') {
    mode_ = Mode::Code;
  } else if (byte == ')') {  // not in a delimiter
    raw_matched_ = 0;
  } else if (raw_matched_ >= 0 && raw_matched_ < raw_size_ &&
             byte == static_cast<unsigned char>(raw_delimiter_[static_cast<std::size_t>(raw_matched_)])) {
    ++raw_matched_;
  } else {
    raw_matched_ = -1;
  }
}

CppToken CppLexer::in_code(unsigned char byte) {
  const bool after_slash = std::exchange(slash_, false);
  if (is_word_start(byte)) {
    at_line_start_ = false;
    return begin_word(byte);
  }
  switch (byte) {
    case '\n':
      return continues_line(byte) ? CppToken::Whitespace : end_of_line();
    case ' ':
    case '\t':
    case '\v':
    case '\f':
    case '\r':
      return CppToken::Whitespace;
    default:
      break;
  }
  const bool first_of_line = std::exchange(at_line_start_, false);
  if (is_digit(byte)) {
    mode_ = Mode::Number;
    return CppToken::Number;
  }
  switch (byte) {
    case '#':
      if (!first_of_line || in_directive()) return CppToken::Operator;
      directive_ = DirectivePart::BeforeName;
      return CppToken::Directive;
    case '"':
      mode_ = Mode::String;
      escape_ = false;
      return CppToken::String;
    case '\'':
      mode_ = Mode::Character;
      escape_ = false;
      return CppToken::Character;
    case '/':
      if (after_slash) {
        mode_ = Mode::LineComment;
        return CppToken::Comment;
      }
      slash_ = true;
      return CppToken::Operator;
    case '*':
      if (!after_slash) return CppToken::Operator;
      mode_ = Mode::BlockComment;
      return CppToken::Comment;
    case '<':
      if (!std::exchange(after_include_, false)) return CppToken::Operator;
      mode_ = Mode::HeaderName;
      return CppToken::HeaderName;
    case '(':
    case '[':
    case '{':
      return CppToken::OpenBracket;
    case ')':
    case ']':
    case '}':
      return CppToken::CloseBracket;
    case ',':
    case ';':
      return CppToken::Separator;
    case '\\':
      return CppToken::Other;
    default:
      return byte < ' ' || byte == 0x7f ? CppToken::Other : CppToken::Operator;
  }
}

CppLexer::Step CppLexer::next(unsigned char byte) {
  Step step;
  const Mode before = mode_;
  const bool ends_line = byte == '\n' && !continues_line(byte);
  switch (mode_) {
    case Mode::Code:
      step.type = in_code(byte);
      break;
    case Mode::Word:
      if (is_in_word(byte)) {
        extend_word(byte);
        step.type = word_type();
        break;
      }
      end_word();
      step.ended_word = true;
      step.type = in_code(byte);
      if (byte == '"' && is_raw_prefix(word_hash_)) {
        mode_ = Mode::RawDelimiter;
        raw_size_ = 0;
      }
      break;
    case Mode::Number:
      if (is_in_word(byte) || byte == '.' || byte == '\'' ||
          ((byte == '+' || byte == '-') && ends_in_exponent(previous_))) {
        step.type = CppToken::Number;
        break;
      }
      mode_ = Mode::Code;
      step.type = in_code(byte);
      break;
    case Mode::String:
      step.type = in_literal(byte, '"', CppToken::String);
      break;
    case Mode::Character:
      step.type = in_literal(byte, '\'', CppToken::Character);
      break;
    case Mode::RawDelimiter:
      step.type = in_raw_delimiter(byte);
      break;
    case Mode::RawText:
      step.type = CppToken::String;
      in_raw_text(byte);
      break;
    case Mode::LineComment:
      step.type = ends_line ? end_of_line() : CppToken::Comment;
      break;
    case Mode::BlockComment:
      step.type = CppToken::Comment;
      if (byte == '/' && previous_ == '*') mode_ = Mode::Code;
      break;
    case Mode::HeaderName:
      step.type = ends_line ? end_of_line() : CppToken::HeaderName;
      if (byte == '>') mode_ = Mode::Code;
      break;
  }
  backslash_ = byte == '\\' || (backslash_ && byte == '\r');
  // The star that opens a comment does not close it as well.
  previous_ = mode_ == Mode::BlockComment && before != Mode::BlockComment ? 0 : byte;
  return step;
}

}  // namespace penstock::train
