#include "penstock/errors.h"
#include "penstock/base/describe.h"

#include <fmt/format.h>

#include "penstock/base/quote.h"

namespace penstock {

namespace {

// A part of the library that knows nothing of ranks, such as a transport, leaves the whole context out.
bool is_empty(const CommContext& context) {
  return context.rank < 0 && !context.peer && !context.lost_rank && context.operation.empty() &&
         context.group.empty() && context.label.empty() && context.elapsed_s == 0;
}

std::string with_context(const std::string& what_happened, const CommContext& context) {
  std::string text = what_happened;
  if (is_empty(context)) return text;
  text += fmt::format(" [rank {}", context.rank);
  if (context.peer) text += fmt::format(", peer {}", *context.peer);
  if (!context.operation.empty()) text += fmt::format(", operation {}", context.operation);
  if (!context.group.empty()) text += fmt::format(", group {}", context.group);
  if (!context.label.empty()) text += fmt::format(", label \"{}\"", context.label);
  text += fmt::format(", after {:.3f} s]", context.elapsed_s);
  return text;
}

}  // namespace

CommError::CommError(const std::string& what_happened, CommContext context)
    : Error(with_context(what_happened, context)), context_(std::move(context)) {}

std::string describe(std::string_view what, std::string_view actual, std::string_view expected,
                     std::string_view remedy) {
  std::string text(what);
  if (!actual.empty()) text += fmt::format(": got {}", actual);
  if (!expected.empty()) text += fmt::format("{} expected {}", actual.empty() ? ":" : ",", expected);
  if (!remedy.empty()) text += fmt::format("; {}", remedy);
  return printable(text);  // user input may be binary
}

void invariant_failed(const char* condition, const char* file, int line, std::string_view why) {
  throw InvariantError(
      fmt::format("broken internal contract: {} ({}:{}: {}); please report this with the full log", why, file,
                  line, condition));
}

}  // namespace penstock
