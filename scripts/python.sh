#!/usr/bin/env bash
# What a user of the Python package does: a new environment, pip install, the README's example; and its commands answer.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/python-venv
python3 -m venv --clear "$venv"
echo "python: pip install .[numpy]"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --retries 3 '.[numpy]'
awk '/^```python$/ { code = 1; next } /^```$/ { if (code) exit } code' README.md >"$venv/readme.py"
[[ -s $venv/readme.py ]] || { echo "python: README.md has no example in Python" >&2; exit 1; }
echo "python: the README's example"
"$venv/bin/python" -B "$venv/readme.py"
"$venv/bin/mxflash" engines >/dev/null
"$venv/bin/mxflash-audit" --help >/dev/null
"$venv/bin/mxflash-capture" --help >/dev/null
"$venv/bin/python" -B -c 'import mxflash; print("python: mxflash", mxflash.__version__, "in", mxflash.__path__[0])'
