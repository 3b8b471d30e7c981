#!/usr/bin/env bash
# The commands that need no tensors do not load LibTorch.
#   light_start_test.sh <penstock>
set -euo pipefail
if ldd "$1" | grep -E 'libtorch|libc10|libopenblas|libgloo'; then
  echo "penstock links LibTorch: commands that need no tensors would wait for it"
  exit 1
fi
"$1" --version
"$1" schedule --kind 1F1B --ranks 2 --microbatches 4 >/dev/null
"$1" train --help | grep 'penstock train' >/dev/null  # this one becomes penstock-tensor

# Without its other half the command says what is missing.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$1" "$work/penstock"
code=0
"$work/penstock" train 2>"$work/message" || code=$?
[ $code -eq 1 ] && grep -q 'penstock: penstock-tensor, .* install Penstock as a whole' "$work/message" ||
  { echo "exit code $code:"; cat "$work/message"; exit 1; }
