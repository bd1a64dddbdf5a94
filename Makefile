# `make demo` shows what it does; `make test` proves it. Both install what they need first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint docs wheel replicas prove prove-status pair study heads bench soak sanitize clean

demo: $(READY)
	$(BIN)/python -m echelon.demo

test: lint
	$(BIN)/python -m pytest --numprocesses=logical --dist=worksteal --durations=20

lint: $(READY)
	$(BIN)/ruff check src benchmarks tools tests scripts examples
	$(BIN)/ruff format --check src benchmarks tools tests scripts examples
	$(BIN)/mypy

# The documents as a site, in build/site; a warning is an error.
docs: $(READY)
	$(BIN)/python -m tools.reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Train the embedded pair again (about two hours on two cores; resumable).
pair: $(READY)
	$(BIN)/python -m echelon.train.pair src/echelon/demo/pair

# The pair of the study, on Python source and on English text in STUDY_TEXT, fetched where it is not there (some four hours on two cores,
# minutes on a CUDA device; resumable).
STUDY_TEXT ?= $(CURDIR)/build/study/text
study: $(READY)
	[ -d $(STUDY_TEXT) ] || scripts/study_text.sh $(STUDY_TEXT)
	$(BIN)/python -m echelon.train.pair build/study --study --text $(STUDY_TEXT) --work build/study/work --steps 2400 --decay 500 --draft-steps 800

# Heads of every kind for the embedded target, which the benchmarks draw curves of (10 to 20 minutes each on two cores, EAGLE's and Scylla's 35; resumable).
# $(call learn,METHOD,BATCHES,OPTIONS)
learn = $(BIN)/echelon train src/echelon/demo/pair/target --method $(1) --steps $(2) $(3) --data build/heads/data --output build/heads/$(1)
heads: $(READY)
	$(call learn,medusa,900)
	$(call learn,clover,900)
	$(call learn,clover2,600)
	$(call learn,eagle,3600)
	$(call learn,eagle3,700,--draft-vocab-size 3072)
	$(call learn,scylla,2700,--num-layers 2 --fine-tuning-steps 900)

# Methods and strategies beside one another, the overhead of a step, the kernels beside the machine's own rates.
bench: $(READY)
	$(BIN)/python -m tools.prove bench

# Replicas and datasets on a Ray cluster of this machine, of which parts are killed. Ray is installed first: 170 MB to load, 550 MB on disk.
RAY := $(VENV)/.ray
replicas: $(RAY)
	$(BIN)/python -m pytest tests/replicas tests/examples

# Every full-size proof, cell by cell; goes on where it was cut off. Results: docs/evidence/prove.json
prove: $(RAY)
	$(BIN)/python -m tools.prove

# Which of them belong to the sources as they are.
prove-status: $(READY)
	$(BIN)/python -m tools.prove --status

# A server under good, bad and abandoned requests for MINUTES; then it must be as it was.
MINUTES ?= 10
soak: $(READY)
	$(BIN)/python -m tools.soak $(MINUTES)

# The C++ kernels alone, on random shapes, under the address and undefined-behaviour sanitisers.
CASES ?= 300
CSRC := src/echelon/csrc
KERNELS := $(filter-out $(CSRC)/bindings/%,$(wildcard $(CSRC)/*.cpp $(CSRC)/*/*.cpp))
SANITISED := $(KERNELS:$(CSRC)/%.cpp=build/sanitised/%.o)
SANITISERS := -std=c++20 -O1 -g -fopenmp -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=all
build/sanitised/%.o: $(CSRC)/%.cpp $(wildcard $(CSRC)/*.h $(CSRC)/*/*.h)
	mkdir -p $(@D)
	$(CXX) $(SANITISERS) -Wno-psabi -c -o $@ $<
sanitize: $(SANITISED)
	$(CXX) $(SANITISERS) -o build/harness $^
	build/harness $(CASES)

# A wheel for any Python and PyTorch of the range that pyproject.toml names, with the kernels in it.
wheel: $(READY)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude 'libtorch*' --exclude 'libgomp*' --wheel-dir build/wheel build/wheel/echelon-*-linux_*.whl
	rm build/wheel/echelon-*-linux_*.whl

# torch comes first and by its exact version, so that nothing that follows can replace it; the kernels are built with its headers.
$(READY): pyproject.toml constraints.txt setup.py $(wildcard src/echelon/csrc/* src/echelon/csrc/*/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 'setuptools>=77'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

$(RAY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --constraint constraints.txt --editable '.[ray]'
	touch $(RAY)

clean:
	rm -rf $(VENV) build
