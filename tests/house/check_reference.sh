#!/usr/bin/env bash
# Whether Doxygen makes the API reference without a warning: every public symbol is documented. Versions differ in what they warn of;
# with another one than Debian 12's (1.9.4) the test is skipped (exit code 77).
#   check_reference.sh <source folder>
set -euo pipefail
command -v doxygen >/dev/null && doxygen --version | grep -q '^1\.9\.4' || { echo "doxygen 1.9.4 is not installed: skipped"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$1"
(cat docs/doxygen/Doxyfile; echo "OUTPUT_DIRECTORY = $work") | doxygen - 2>&1
[ -e "$work/html/classpenstock_1_1PipelineStage.html" ] || { echo "the reference lacks PipelineStage"; exit 1; }
