#!/bin/sh
# Everything that only a GPU can show, as much as nine minutes hold, the most telling first (all: about twenty-five). Results: docs/evidence/gpu_check.json
#   scripts/gpu_check.sh [--fresh] [--minutes N] [PREFIX ...]
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m benchmarks.gpu "$@"
