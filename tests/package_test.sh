#!/usr/bin/env bash
# Installs into a temporary prefix, moves it (a package must be relocatable), builds examples/consumer against it and runs it.
#   package_test.sh <build folder> <source folder>
set -euo pipefail
build=$1
source=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build" --prefix "$work/first" >/dev/null
mv "$work/first" "$work/prefix"
! grep -rn -e "$build" -e "$source" "$work/prefix" --include='*.cmake' || { echo "the package names the folder it was built in"; exit 1; }
torch=$(sed -n 's/^Torch_DIR:[A-Z]*=//p' "$build/CMakeCache.txt")
cmake -S "$source/examples/consumer" -B "$work/consumer" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" ${torch:+-DTorch_DIR="$torch"} -DCMAKE_CXX_FLAGS=-O0 >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
cmake --build "$work/consumer" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$work/prefix/bin/penstock" launch -n 2 -- "$work/consumer/consumer"
