#!/usr/bin/env bash
# The manual page names every command, and the completion of bash offers commands and flags.
#   command_pages_test.sh <penstock> <source folder>
set -euo pipefail
penstock=$1
source=$2
commands=$("$penstock" --help | sed -n '/^subcommands:/I,$s/^  \([a-z]\+\) .*/\1/p')
[ "$(echo "$commands" | wc -w)" -ge 14 ] || { echo "too few commands in --help: $commands"; exit 1; }
for command in $commands; do
  grep -qx "\.B $command" "$source/packaging/penstock.1" || { echo "the manual page lacks $command"; exit 1; }
done
# The example that needs nothing but the command itself.
example=$(grep '^penstock schedule ' "$source/packaging/penstock.1")
"$penstock" ${example#penstock } >/dev/null || { echo "the manual page's example fails: $example"; exit 1; }
source "$source/packaging/penstock.bash"
complete_words() {
  COMP_WORDS=("$penstock" "$@")
  COMP_CWORD=$#
  COMPREPLY=()
  _penstock
  echo " ${COMPREPLY[*]} "
}
expect() { [[ $1 == *" $2 "* ]] || { echo "completion: $2 is not in:$1"; exit 1; }; }
expect "$(complete_words sch)" schedule
expect "$(complete_words schedule --mic)" --microbatches
expect "$(complete_words data m)" make
echo "$(echo "$commands" | wc -w) commands"
