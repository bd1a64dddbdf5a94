#!/bin/sh
# Everything that only a GPU can show, in under nine minutes; goes on where it was cut off. Results: docs/evidence/gpu_check.json
#   scripts/gpu_check.sh [--fresh] [--minutes N] [PREFIX ...]
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m benchmarks.gpu "$@"
