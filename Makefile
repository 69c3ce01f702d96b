# Every target makes and uses the virtual environment at the root.
#   PYTHON=python3.12     the interpreter it is made from (3.11 or newer)
#   CONSTRAINTS=/dev/null keep a torch that is already in .venv, e.g. a ROCm or CUDA build
SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS   += --no-print-directory
.DEFAULT_GOAL := help

PYTHON      ?= python3
VENV        := .venv
BIN         := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
PIP         := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)
BASE        := $(VENV)/.base
DEV         := $(VENV)/.dev

.PHONY: help demo test check bench exact soak kernels format clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

demo: $(BASE) ## a word problem, code and prose on the bundled model
	@$(BIN)/firesteel demo

WORKERS ?= 2
test: export OMP_NUM_THREADS := 1
test: $(DEV) ## all tests that need no accelerator, a file per process (WORKERS=2)
	@$(BIN)/python -m pytest -m "unit or cpu" -q -n $(WORKERS) --dist loadfile

check: export OMP_NUM_THREADS := 1
check: $(DEV) ## formatting, lint, types and the quick tests
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy
	$(BIN)/python -m pytest -m unit -q

bench: export OMP_NUM_THREADS := 1
bench: $(DEV) ## benchmarks against a baseline in the same run; results under bench/results
	$(BIN)/python -m firesteel.bench.hf --json bench/results/hf.json
	$(BIN)/python -m firesteel.bench.host --json bench/results/host.json
	$(BIN)/python -m firesteel.bench.structured --both --json bench/results/structured.json

MINUTES ?= 10
exact: export OMP_NUM_THREADS := 1
exact: $(DEV) ## the long proof that speculation changes no text (MINUTES=10), and random traffic
	$(BIN)/python -m firesteel.bench.exact --minutes $(MINUTES) --json bench/results/exact.json
	FIRESTEEL_OPERATIONS=2000 $(BIN)/python -m pytest -q tests/cpu/test_engine_random.py
	FIRESTEEL_NOISE_LOG2=26 $(BIN)/python -m pytest -q tests/unit/test_noise.py

CLIENTS ?= 200
SOAK_SECONDS ?= 300
soak: export OMP_NUM_THREADS := 1
soak: $(DEV) ## many streaming clients, many of which leave (CLIENTS=200, SOAK_SECONDS=300)
	$(BIN)/python -m firesteel.bench.soak --clients $(CLIENTS) --seconds $(SOAK_SECONDS) --json bench/results/soak.json

KERNEL_JOBS ?= 2
kernels: export OMP_NUM_THREADS := 1
kernels: $(DEV) ## compile every GPU kernel for gfx950, gfx942, sm_90 and sm_100, without a GPU (KERNEL_JOBS=2)
	$(BIN)/python -m firesteel.ops.triton.compile --jobs $(KERNEL_JOBS) --json bench/results/kernels.json --docs docs/kernels.md

format: $(DEV) ## rewrite the sources in the house style
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix src tests

clean: ## remove the virtual environment and every cache
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -prune -exec rm -rf {} +
	rm -rf src/*.egg-info

$(VENV)/pyvenv.cfg:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; install Python 3.11 or newer, or set PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: Firesteel needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); set PYTHON=" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "make: no virtual environment; install the venv module (Debian: python3-venv)" >&2; exit 1; }

$(BASE): $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "installing firesteel into $(VENV) (torch is large: minutes the first time)"
	@$(PIP) -e '.[serve,structured]'
	@touch $@

$(DEV): $(VENV)/pyvenv.cfg pyproject.toml constraints.txt Makefile
	@echo "installing firesteel, its tests and checks into $(VENV) (torch is large: minutes the first time)"
	@$(PIP) -e '.[test,dev,serve,structured,bench,gpu,otel,train]'
	@touch $(BASE) $@
