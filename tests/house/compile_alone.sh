#!/usr/bin/env bash
# Compiles every header and source as a unit of its own, so that missing includes are found. Takes about half an hour on two cores.
#   compile_alone.sh <build folder> <source folder>
# The flags come from <build folder>/alone.flags, which CMake writes.
set -euo pipefail
build=$1
source=$2
# The system's own folder must not be named: its headers are found by include_next.
flags=$(sed -E 's#-isystem (/usr/include|/usr/lib/../include)( |$)# #g; s#-isystem (/usr/include|/usr/lib/../include)( |$)# #g' "$build/alone.flags")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$source"

list="$work/list"
find penstock include -name '*.h' -o -name '*.cpp' | sort > "$list"

compile() {
  local file=$1
  case $file in
    *_cuda.cpp|*/cuda_kernel.cpp|*/nccl_backend.cpp) return 0 ;;  # need CUDA's headers
    */ucx_*) [ -e /usr/include/ucp/api/ucp.h ] || return 0 ;;
  esac
  local unit="$2/$(printf '%s' "$file" | tr '/.' '__').cpp"
  if [ "${file##*.}" = h ]; then
    printf '#include "%s"\n' "${file#include/}" > "$unit"
  else
    cp "$file" "$unit"
  fi
  if ! c++ $3 -fsyntax-only -x c++ "$unit" 2> "$unit.log"; then
    echo "$file does not compile alone:"
    head -5 "$unit.log"
    return 1
  fi
}
export -f compile
count=$(wc -l < "$list")
if xargs -P "$(nproc)" -I{} bash -c 'compile "$1" "$2" "$3"' _ {} "$work" "$flags" < "$list" > "$work/report"; then
  echo "$count files compile alone"
else
  cat "$work/report"
  exit 1
fi
