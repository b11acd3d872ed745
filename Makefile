# Everything starts here. Each target sets up what it needs, on a fresh machine too.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: help setup demo test test-all lint format docs notebooks dist changelog proof bench-setup bench clean
.DEFAULT_GOAL := help

help:  ## show what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(VENV)/.core: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -U "pip>=25.1"
	$(PIP) "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(PIP) -e ".[report]"
	@touch $@

$(VENV)/.full: $(VENV)/.core
	$(PIP) -e ".[all]" --group test --group adapters --group lint
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	$(PIP) --group docs
	@touch $@

setup: $(VENV)/.full  ## install everything for development

demo: $(VENV)/.core  ## the main job on data that ships with the package
	$(BIN)/knowable demo

test: $(VENV)/.full  ## the tests, without the slow statistical ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(VENV)/.full  ## all tests, on five seeds where they are seeded
	OMP_NUM_THREADS=1 KNOWABLE_SEEDS=0-4 $(BIN)/python -m pytest -n 2

lint: $(VENV)/.full  ## style, types
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/pyright

format: $(VENV)/.full  ## put the code in order
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks

docs: $(VENV)/.docs  ## the documentation, into site/
	$(BIN)/mkdocs build --strict

notebooks: $(VENV)/.docs  ## the tutorials as Jupyter notebooks, into notebooks/
	$(BIN)/python docs/hooks/notebooks.py notebooks

dist: $(VENV)/.core  ## wheel and source archive, into dist/
	$(PIP) build
	$(BIN)/python -m build

changelog:  ## join the fragments of changes/ into CHANGELOG.md under the package's version
	$(PYTHON) changes/join.py

proof: $(VENV)/.core  ## the page and the table that compare with others, from benchmarks/results
	$(BIN)/python -m benchmarks.proof

bench-setup:  ## the peers, in an environment of their own
	bash benchmarks/setup_peers.sh

bench:  ## time ours and the peers
	.venv-bench/bin/python -m benchmarks.run

clean:  ## remove environments and what was built
	rm -rf $(VENV) .venv-bench site dist build notebooks
