#!/usr/bin/env bash
# same_losses.sh PENSTOCK PROGRAM: what the program prints alone and on two ranks must be the same, to four digits.
set -euo pipefail
alone=$("$2")
together=$("$1" launch -n 2 -- "$2" | sed -n 's/^.*\(step .*\)$/\1/p')
[ -n "$alone" ]
# A digit may round to the other side.
paste <(echo "$alone") <(echo "$together") | awk '{ d = $4 - $8; if (NF != 8 || $2 != $6 || d > 2e-4 || d < -2e-4) { print "differs: " $0; bad = 1 } } END { exit bad }'
echo "$alone" | tail -1
