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
