#!/usr/bin/env bash
# Compiles files as units of their own, so that missing includes are found: each is included by a unit with a failing assertion at its
# end. The compiler must come as far as that and stops there, before it instantiates what the precompiled header has left, which is most of
# what a unit costs.
#   compile_sample.sh <build folder> <name of a source whose flags are used> <list of files>
set -euo pipefail
build=$1
carrier=$2
list=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The command of the carrier without launcher, dependency files, source and result.
command=$(sed -n "s/^ *\"command\": \"\(.*$carrier.*\)\",\$/\1/p" "$build/compile_commands.json" | sed 's/\\"/"/g; s/\\\\/\\/g')
[ -n "$command" ] || { echo "compile_commands.json has no $carrier"; exit 1; }
command=$(printf '%s' "$command" | sed -E 's/^.*ccache +//; s/ -o [^ ]+//; s/ -c [^ ]+//')

compile() {
  local file=$1 unit="$2/$(printf '%s' "$1" | tr '/.' '__').cpp"
  printf '#include "%s"\nstatic_assert(false, "the end");\n' "$file" > "$unit"
  if ! (cd "$4" && eval "$3 -w -fsyntax-only -Wfatal-errors $unit") > "$unit.log" 2>&1 &&
     grep -q "^$unit:2:.*the end" "$unit.log"; then
    return 0
  fi
  echo "$file does not compile alone:"
  head -5 "$unit.log"
  return 1
}
export -f compile
count=$(wc -l < "$list")
[ "$count" -gt 0 ] || { echo "$list is empty"; exit 1; }
if xargs -P "$(nproc)" -I{} bash -c 'compile "$1" "$2" "$3" "$4"' _ {} "$work" "$command" "$build" < "$list" > "$work/report"; then
  echo "$count files compile alone"
else
  cat "$work/report"
  exit 1
fi
