#!/usr/bin/env bash
# Whether the tree is formatted as .clang-format says. Needs clang-format 14; without it the test is skipped (exit code 77).
#   check_format.sh <source folder>
set -euo pipefail
cd "$1"
tool=
for candidate in clang-format-14 clang-format; do
  if command -v "$candidate" >/dev/null && "$candidate" --version | grep -q 'version 14\.'; then tool=$candidate; break; fi
done
[ -n "$tool" ] || { echo "clang-format 14 is not installed: skipped"; exit 77; }
find penstock include tests bench examples \( -name '*.h' -o -name '*.cpp' \) -not -path '*/golden/*' -print0 |
  xargs -0 -n 100 -P 2 "$tool" --dry-run -Werror ||
  { echo "run: find penstock include tests bench examples -name '*.h' -o -name '*.cpp' | xargs clang-format-14 -i"; exit 1; }
