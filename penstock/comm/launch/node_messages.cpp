#include "penstock/comm/launch/node_messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <optional>
#include <vector>

#include "penstock/base/number.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

constexpr std::string_view kNodeMark = "node1";
constexpr std::size_t kNodeFields = 16;
constexpr std::size_t kLongestHost = 255, kLongestText = 4096;

std::string one_field(std::string text, std::size_t longest) {
  if (text.size() > longest) text.resize(longest);
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 32 || c == 127) c = ' ';
  return text;
}

}  // namespace

std::string encode(const NodeMessage& message) {
  return fmt::format("{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}", kNodeMark,
                     static_cast<int>(message.kind), message.attempt, message.node, message.nodes,
                     message.least_nodes, message.ranks, message.first_rank, message.world, message.port,
                     message.rank, message.code, message.signal, message.final ? 1 : 0,
                     one_field(message.host, kLongestHost), one_field(message.text, kLongestText));
}

NodeMessage decode_node_message(std::string_view bytes) {
  std::vector<std::string_view> fields;
  for (std::string_view rest = bytes; fields.size() <= kNodeFields;) {
    const auto tab = rest.find('\t');
    fields.push_back(rest.substr(0, tab));
    if (tab == std::string_view::npos) break;
    rest.remove_prefix(tab + 1);
  }
  std::size_t at = 1;
  bool good = fields.size() == kNodeFields && fields[0] == kNodeMark && bytes.size() <= kMaxNodeMessage &&
              std::none_of(fields.back().begin(), fields.back().end(),
                           [](char c) { return static_cast<unsigned char>(c) < 32; });
  const auto next = [&] {
    const auto number = good ? parse_integer(fields[at++]) : std::nullopt;
    good = number && *number >= INT_MIN && *number <= INT_MAX;
    return good ? static_cast<int>(*number) : 0;
  };
  NodeMessage message;
  const int kind = next();
  good = good && kind >= 0 && kind <= static_cast<int>(NodeMessage::Kind::Beat);
  message.kind = static_cast<NodeMessage::Kind>(good ? kind : 0);
  for (int* place :
       {&message.attempt, &message.node, &message.nodes, &message.least_nodes, &message.ranks,
        &message.first_rank, &message.world, &message.port, &message.rank, &message.code, &message.signal})
    *place = next();
  const int final = next();
  good = good && (final == 0 || final == 1);
  if (!good)
    throw MismatchError(
        "launch: another launcher sent bytes that are not a message; start the same build of Penstock on "
        "every "
        "host");
  message.final = final == 1;
  message.host = fields[at];
  message.text = fields[at + 1];
  return message;
}

}  // namespace penstock::comm
