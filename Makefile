# `make demo` shows what it does; `make test` proves it. Both install what they need first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint prove pair bench clean

demo: $(READY)
	$(BIN)/python -m echelon.demo

test: lint
	$(BIN)/python -m pytest --durations=20

lint: $(READY)
	$(BIN)/ruff check src tests scripts
	$(BIN)/ruff format --check src tests scripts
	$(BIN)/mypy

# Train the embedded pair again (about two hours on two cores; resumable).
pair: $(READY)
	$(BIN)/python -m echelon.train.pair src/echelon/demo/pair

# The table of the README and the overhead of a step.
bench: $(READY)
	$(BIN)/echelon bench throughput --parameters 500000000 --output docs/evidence/throughput.json
	$(BIN)/echelon bench overhead --output docs/evidence/overhead.json
	$(BIN)/echelon bench pair --output docs/evidence/pair.json

# Every full-size proof, cell by cell; goes on where it was cut off. Results: docs/evidence/prove.json
prove: $(READY)
	$(BIN)/python scripts/prove.py

# torch comes first and by its exact version, so that nothing that follows can replace it; the kernels are built against it.
$(READY): pyproject.toml constraints.txt setup.py $(wildcard src/echelon/csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 'setuptools>=77' ninja
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build
