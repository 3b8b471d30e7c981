# Turns the plain comments of our headers into ones that Doxygen reads:
#   a comment in front of a declaration     -> ///
#   a comment after one, on the same line   -> ///<
#   the head of the file                    -> its description
# Indented lines in comments are code.
function escaped_plain(text) {
  gsub(/&/, "\\&amp;", text)
  gsub(/</, "\\&lt;", text)
  gsub(/>/, "\\&gt;", text)
  gsub(/@/, "\\@", text)
  gsub(/#/, "\\#", text)
  gsub(/\*/, "\\*", text)
  gsub(/_/, "\\_", text)
  return text
}
# Doxygen takes `code` and "strings" literally, so nothing is escaped there.
function escaped(text,   out) {
  out = ""
  while (match(text, /`[^`]*`|"[^"]*"/)) {
    out = out escaped_plain(substr(text, 1, RSTART - 1)) substr(text, RSTART, RLENGTH)
    text = substr(text, RSTART + RLENGTH)
  }
  return out escaped_plain(text)
}
BEGIN { head = 1; if (FILENAME == "") name = "" }
NR == 1 && /^\/\// { print "/// \\file"; }
head && /^#pragma once/ { head = 0; print; next }
/^ *\/\/ ----/ { print; next }
/^ *\/\// {
  match($0, /^ *\/\//)
  indent = substr($0, 1, RLENGTH - 2)
  text = substr($0, RLENGTH + 1)
  if (text ~ /^   /) {
    if (!code) print indent "/// \\code{.unparsed}"
    code = 1
    print indent "///" text
  } else {
    if (code) print indent "/// \\endcode"
    code = 0
    print indent "///" escaped(text)
  }
  next
}
{
  if (code) { print "/// \\endcode"; code = 0 }
  if ($0 ~ /^#include/ || $0 ~ /^}  \/\/ namespace/) { print; next }
  at = match($0, / +\/\/ /)
  if (at > 0 && $0 !~ /"[^"]*\/\/[^"]*"/) { print substr($0, 1, at - 1) "  ///< " escaped(substr($0, at + RLENGTH)); next }
  print
}
