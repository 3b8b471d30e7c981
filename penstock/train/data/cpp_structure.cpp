#include "penstock/train/data/cpp_structure.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/train/data/byte_tokenizer.h"

namespace penstock::train {
namespace {

template <class Small>
Small saturated(std::uint64_t value) {
  return static_cast<Small>(std::min<std::uint64_t>(value, std::numeric_limits<Small>::max()));
}

bool holds_definitions(CppKind kind) {
  return kind == CppKind::File || kind == CppKind::Namespace || kind == CppKind::Type;
}

// Whether commas end elements, and not only semicolons.
bool is_list(CppKind kind) {
  return !holds_definitions(kind) && kind != CppKind::Function && kind != CppKind::Block;
}

// Whether the closing brace ends the statement that it is in, without a semicolon.
bool ends_statement(CppKind kind) {
  return kind == CppKind::Namespace || kind == CppKind::Function || kind == CppKind::Block;
}

bool is_literal(CppToken type) {
  return type == CppToken::String || type == CppToken::Character || type == CppToken::Escape;
}

}  // namespace

CppStructure::CppStructure() { begin_document(); }

void CppStructure::begin_document() {
  lexer_ = CppLexer();
  position_ = 0;
  frames_.assign(1, Frame());
  beyond_ = 0;
  braces_ = 0;
  defines_macro_ = colon_ = false;
  last_operator_ = 0;
  conditionals_.clear();
  conditionals_beyond_ = 0;
  names_.fill(0);
}

std::size_t CppStructure::bytes() const {
  return sizeof *this + frames_.size() * sizeof(Frame) + conditionals_.size() * sizeof(conditionals_[0]);
}

void CppStructure::read(std::span<const std::int64_t> tokens, std::span<TokenStructure> found) {
  if (!found.empty() && found.size() != tokens.size())
    throw ValueError(describe("buffer for structure", fmt::format("{}", found.size()),
                              fmt::format("the number of tokens, {}, or 0", tokens.size())));
  TokenStructure unused;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    TokenStructure& place = found.empty() ? unused : found[i];
    if (tokens[i] == byte_tokenizer::kEndOfDocument) {
      place = {};
      place.node = static_cast<std::uint8_t>(CppToken::EndOfDocument);
      begin_document();
      continue;
    }
    next(tokens[i] >= 0 && tokens[i] < 256 ? static_cast<unsigned char>(tokens[i]) : 0, place);
  }
}

void CppStructure::describe_byte(CppToken type, TokenStructure& found) const {
  const Frame& frame = frames_.back();
  found.node = static_cast<std::uint8_t>(type);
  found.depth = saturated<std::uint16_t>(frames_.size() - 1 + beyond_);
  found.sibling = frame.sibling;
  found.level = frames_[frame.scope].level;
  const std::uint64_t distance = frame.bracket == 0 ? 0 : position_ - frame.opened;
  found.parent_distance =
      distance > std::numeric_limits<std::uint32_t>::max() ? 0 : static_cast<std::uint32_t>(distance);
  const CppKind kind = type == CppToken::Comment ? CppKind::Comment
                       : lexer_.in_directive()   ? CppKind::Directive
                       : is_literal(type)        ? CppKind::Literal
                                                 : frame.kind;
  found.kind = static_cast<std::uint8_t>(kind);
  found.name = type == CppToken::Identifier ? lexer_.word_hash() : 0;
}

void CppStructure::next(unsigned char byte, TokenStructure& found) {
  const bool was_directive = lexer_.in_directive();
  const CppLexer::Step step = lexer_.next(byte);
  if (step.ended_word) {
    if (!was_directive)
      end_word();
    else if (lexer_.word_is_directive_name())
      end_directive_name();
    else if (std::exchange(defines_macro_, false))
      define(lexer_.word_hash(), 0);
  }
  CppToken type = step.type;
  const bool is_code = !lexer_.in_directive() && type != CppToken::Comment && type != CppToken::Whitespace &&
                       type != CppToken::Identifier && type != CppToken::Keyword && type != CppToken::Other;
  if (is_code)
    in_code(byte, type, found);
  else
    describe_byte(type, found);
  if (type != CppToken::Operator) last_operator_ = 0;
  ++position_;
}

// Describes the byte before what it opens, and after what was left open where it closes.
void CppStructure::in_code(unsigned char byte, CppToken& type, TokenStructure& found) {
  switch (type) {
    case CppToken::OpenBracket:
      resolve_colon();
      if (byte == '{') drop_angles();
      describe_byte(type, found);
      open_code_bracket(byte);
      return;
    case CppToken::CloseBracket: {
      resolve_colon();
      const bool closes = beyond_ > 0 || find_opening(byte);
      describe_byte(type, found);
      if (closes) close();
      return;
    }
    case CppToken::Separator:
      resolve_colon();
      if (byte == ';') drop_angles();
      describe_byte(type, found);
      on_separator(byte);
      return;
    case CppToken::Operator: {
      const Frame& frame = frames_.back();
      if (byte == '<' && beyond_ == 0 && (frame.last == Last::TemplateWord || frame.bracket == '<')) {
        type = CppToken::OpenBracket;
        describe_byte(type, found);
        open('<', CppKind::Template);
      } else if (byte == '>' && frame.bracket == '<' && last_operator_ != '-' && beyond_ == 0) {
        type = CppToken::CloseBracket;
        describe_byte(type, found);
        close();
      } else {
        describe_byte(type, found);
        on_operator(byte);
        last_operator_ = byte;
      }
      return;
    }
    default:  // numbers and literals
      resolve_colon();
      describe_byte(type, found);
      frames_.back().last = Last::Value;
      return;
  }
}

void CppStructure::end_word() {
  resolve_colon();
  const CppKeyword keyword = lexer_.keyword();
  if (keyword == CppKeyword::None)
    on_name(lexer_.word_hash());
  else
    on_keyword(keyword);
}

// The branches of a conditional are alternatives: each begins where the first one began. A branch that closed
// more than it opened leaves that as it is.
void CppStructure::end_directive_name() {
  const std::uint32_t name = lexer_.word_hash();
  defines_macro_ = name == word_hash_of("define");
  if (name == word_hash_of("if") || name == word_hash_of("ifdef") || name == word_hash_of("ifndef")) {
    if (conditionals_.size() < kMaxConditionals)
      conditionals_.push_back(static_cast<std::uint16_t>(frames_.size()));
    else
      ++conditionals_beyond_;
  } else if (conditionals_beyond_ > 0) {
    if (name == word_hash_of("endif")) --conditionals_beyond_;
  } else if (!conditionals_.empty()) {
    if (name == word_hash_of("endif"))
      conditionals_.pop_back();
    else if (name == word_hash_of("else") || name == word_hash_of("elif") ||
             name == word_hash_of("elifdef") || name == word_hash_of("elifndef"))
      drop_to(conditionals_.back());
  }
}

void CppStructure::on_keyword(CppKeyword keyword) {
  Frame& frame = frames_.back();
  switch (keyword) {
    case CppKeyword::None:
    case CppKeyword::Plain:
      frame.last = Last::Word;
      break;
    case CppKeyword::Namespace:
      frame.head |= kNamespaceWord;
      frame.last = Last::Word;
      break;
    case CppKeyword::Type:
      frame.head |= kTypeWord;
      frame.last = Last::TypeWord;
      break;
    case CppKeyword::Enum:
      frame.head |= kEnumWord;
      frame.last = Last::TypeWord;
      break;
    case CppKeyword::Control:
      frame.last = Last::ControlWord;
      break;
    case CppKeyword::Block:
      frame.last = Last::BlockWord;
      break;
    case CppKeyword::Access:
      frame.last = Last::AccessWord;
      break;
    case CppKeyword::Template:
      frame.last = Last::TemplateWord;
      break;
    case CppKeyword::Operator:
      frame.last = Last::OperatorWord;
      break;
    case CppKeyword::Extern:
      frame.head |= kExternWord;
      frame.last = Last::Word;
      break;
    case CppKeyword::Qualifier:
      frame.last = Last::Qualifier;
      break;
  }
}

void CppStructure::on_name(std::uint32_t hash) {
  Frame& frame = frames_.back();
  Frame& scope = frames_[frame.scope];
  std::uint32_t used = hash;
  if (is_scope(frame) && (frame.head & kNamed) == 0) {
    used = std::exchange(frame.name, hash);  // the former one was not what is defined
    if (frame.last == Last::TypeWord) frame.head |= kNamed;
  }
  if (used != 0) scope.level = std::max(scope.level, level_of(used));
  frame.last = Last::Name;
}

// A single colon is told from :: by the token after it.
void CppStructure::resolve_colon() {
  if (!std::exchange(colon_, false)) return;
  Frame& frame = frames_.back();
  if (frame.last == Last::AccessWord) {
    end_statement(frame);
    return;
  }
  if ((frame.head & kParentheses) != 0) frame.head |= kInitializers;
  frame.last = Last::Colon;
}

void CppStructure::on_operator(unsigned char byte) {
  Frame& frame = frames_.back();
  if (byte == ':') {
    if (last_operator_ == ':') {
      colon_ = false;
      frame.last = Last::Operator;
    } else {
      resolve_colon();
      colon_ = true;
    }
    return;
  }
  resolve_colon();
  if (frame.last == Last::OperatorWord) return;  // part of the name of an operator function
  const bool assigns = byte == '=' && last_operator_ == 0;
  if (assigns && is_scope(frame)) {
    frame.head |= kAssignment;
    if (frame.name != 0) frame.head |= kNamed;
  }
  frame.last = assigns ? Last::Assignment : Last::Operator;
}

void CppStructure::on_separator(unsigned char byte) {
  Frame& frame = frames_.back();
  if (beyond_ > 0) return;
  if (byte == ';') {
    end_statement(frame);
  } else {
    if (is_list(frame.kind)) frame.sibling = saturated<std::uint32_t>(std::uint64_t{frame.sibling} + 1);
    frame.last = Last::Comma;
  }
}

void CppStructure::end_statement(Frame& frame) {
  if (is_scope(frame)) {
    if (frame.name != 0) define(frame.name, frame.level);
    frame.highest = std::max(frame.highest, frame.level);
    frame.level = 0;
  }
  frame.name = 0;
  frame.head = 0;
  frame.last = Last::None;
  frame.sibling = saturated<std::uint32_t>(std::uint64_t{frame.sibling} + 1);
}

CppKind CppStructure::kind_of_parentheses() const {
  const Frame& frame = frames_.back();
  switch (frame.last) {
    case Last::ControlWord:
      return CppKind::Condition;
    case Last::Name:
    case Last::Square:  // a lambda
    case Last::Angle:
    case Last::OperatorWord:
    case Last::Parentheses:  // operator()(
      return holds_definitions(frame.kind) ? CppKind::Parameters : CppKind::Arguments;
    default:
      return CppKind::Group;
  }
}

CppKind CppStructure::kind_of_braces() const {
  const Frame& frame = frames_.back();
  const bool in_scope = holds_definitions(frame.kind), has_parentheses = (frame.head & kParentheses) != 0;
  const bool after_parameters = frame.last == Last::Parentheses || frame.last == Last::Qualifier;
  if ((frame.head & kNamespaceWord) != 0) return CppKind::Namespace;
  if ((frame.head & kExternWord) != 0 && frame.last == Last::Value) return CppKind::Namespace;  // extern "C"
  if (frame.last == Last::Assignment) return CppKind::Initializer;
  if ((frame.head & (kTypeWord | kEnumWord)) != 0 && (frame.head & kAssignment) == 0 &&
      !(has_parentheses && after_parameters))
    return (frame.head & kEnumWord) != 0 ? CppKind::Enumeration : CppKind::Type;
  if (in_scope) {
    if (!has_parentheses || (frame.head & kAssignment) != 0) return CppKind::Initializer;
    const bool of_member =
        (frame.head & kInitializers) != 0 && (frame.last == Last::Name || frame.last == Last::Angle);
    return of_member ? CppKind::Initializer : CppKind::Function;
  }
  if (after_parameters || frame.last == Last::Square || frame.last == Last::BlockWord) return CppKind::Block;
  const bool begins = frame.last == Last::None || frame.last == Last::Colon;
  return begins && !is_list(frame.kind) ? CppKind::Block : CppKind::Initializer;
}

void CppStructure::open_code_bracket(unsigned char byte) {
  const auto bracket = static_cast<char>(byte);
  Frame& frame = frames_.back();
  const CppKind kind = byte == '{'   ? kind_of_braces()
                       : byte == '(' ? kind_of_parentheses()
                                     : CppKind::Subscript;
  // The name before the first parentheses is that of a function; before = or braces, of a variable.
  if (is_scope(frame) && frame.name != 0) frame.head |= kNamed;
  open(bracket, kind);
}

void CppStructure::open(char bracket, CppKind kind) {
  if (frames_.size() > kMaxDepth) {
    ++beyond_;
    return;
  }
  Frame frame;
  frame.opened = position_;
  frame.kind = kind;
  frame.bracket = bracket;
  frame.scope = holds_definitions(kind) ? static_cast<std::uint16_t>(frames_.size()) : frames_.back().scope;
  frames_.push_back(frame);
  if (bracket == '{') ++braces_;
}

void CppStructure::drop_to(std::size_t frames) {
  if (frames_.size() <= frames) return;
  for (; frames_.size() > frames; frames_.pop_back())
    if (frames_.back().bracket == '{') --braces_;
  beyond_ = 0;
  Frame& frame = frames_.back();  // what it had before the brackets belongs to the former branch
  frame.head = 0;
  frame.name = 0;
  frame.last = Last::None;
}

void CppStructure::drop_angles() {
  while (frames_.back().bracket == '<' && beyond_ == 0) frames_.pop_back();
}

bool CppStructure::find_opening(unsigned char byte) {
  if (byte == '}') {
    if (braces_ == 0) return false;
    while (frames_.back().bracket != '{') frames_.pop_back();
    return true;
  }
  drop_angles();
  return frames_.back().bracket == (byte == ')' ? '(' : '[');
}

void CppStructure::close() {
  if (beyond_ > 0) {
    --beyond_;
    return;
  }
  const Frame closed = frames_.back();
  const bool is_own_scope = is_scope(frames_.back());
  frames_.pop_back();
  Frame& frame = frames_.back();
  switch (closed.bracket) {
    case '(':
      frame.head |= kParentheses;
      frame.last = Last::Parentheses;
      return;
    case '[':
      frame.last = Last::Square;
      return;
    case '<':
      frame.last = Last::Angle;
      return;
    default:
      break;
  }
  --braces_;
  // A type uses what its members use.
  if (is_own_scope && closed.kind == CppKind::Type) {
    Frame& around = frames_[frame.scope];
    around.level = std::max({around.level, closed.highest, closed.level});
  }
  frame.last = Last::Braces;
  if (ends_statement(closed.kind)) {
    if (closed.kind == CppKind::Namespace) frame.name = 0;  // defines nothing
    end_statement(frame);
  }
}

std::uint8_t CppStructure::level_of(std::uint32_t name) const {
  const std::uint32_t entry = names_[name % kNames];
  return (entry >> 8) == (name >> 8) ? static_cast<std::uint8_t>(entry & 0xff) : 0;
}

void CppStructure::define(std::uint32_t name, std::uint8_t level) {
  const std::uint32_t above = std::min<std::uint32_t>(level, kMaxLevel) + 1;
  names_[name % kNames] = (name & ~0xffU) | above;
}

}  // namespace penstock::train
