#!/usr/bin/env bash
# Line coverage of src/ by the tests that ran last in build/dev ("make coverage" runs them); fails below 90 %.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build/coverage
gcovr --root . --object-directory build/dev --filter 'src/' -j "$(nproc)" --exclude-throw-branches \
  --html-details build/coverage/index.html --txt build/coverage/summary.txt --fail-under-line 90 build/dev
tail -n 3 build/coverage/summary.txt
