# Set-up, checks and the demo in one virtual environment. `make help` lists the targets.

VENV ?= .venv
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
  if "$$p" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
  then echo "$$p"; break; fi; done)

# Processes that tests are shared among; a file stays in one of them.
JOBS ?= 2

# What stands behind the claim that text is the target's own: the proof's assumptions, the fuzzer,
# certificates and the server's robustness.
LOSSLESSNESS := tests/fuzz tests/losslessness tests/robustness tests/certify \
  tests/test_acceptance.py \
  tests/reference/test_causal_prefix.py \
  tests/reference/test_coins.py \
  tests/reference/test_first_router_stop.py \
  tests/reference/test_greedy_identity.py \
  tests/reference/test_sampling_exact.py \
  tests/reference/test_state_invariant.py
# Of hypothesis, in tests marked `examples`.
LONG_EXAMPLES ?= 2000

# SGLang pins other versions than ours, so its contract tests have an environment of their own.
SGLANG_VENV ?= .venv-sglang
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
REQUIREMENTS := pyproject.toml constraints.txt Makefile

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-long test-losslessness test-losslessness-long test-sglang lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-22s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.stamp-test ## set up, then show the whole path on the embedded pair (CPU, minutes)
	$(BIN)/hybridspec demo

# Models in tests are tiny: more threads only wait for each other.
test test-long test-losslessness test-losslessness-long test-sglang: export OMP_NUM_THREADS ?= 1

test: $(VENV)/.stamp-test ## set up, then run the tests that need no GPU and no patience
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m 'not slow'

test-long: $(VENV)/.stamp-test ## run the tests that take minutes
	$(BIN)/python -m pytest -q -m slow

test-losslessness: $(VENV)/.stamp-test ## the proof's assumptions, the fuzzer, certificates and the server's robustness, in short (CPU, under 4 minutes)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m 'not slow' $(LOSSLESSNESS)

test-losslessness-long: export HYBRIDSPEC_TEST_EXAMPLES ?= $(LONG_EXAMPLES)
test-losslessness-long: $(VENV)/.stamp-test ## the same at length: many seeds, samples, requests and kills
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m 'slow or examples' --durations=15 $(LOSSLESSNESS)

test-sglang: export HYBRIDSPEC_SGLANG_PYTHON = $(abspath $(SGLANG_VENV))/bin/python
test-sglang: export HYBRIDSPEC_SGLANG_NEXT = $(abspath $(SGLANG_VENV))/next
test-sglang: $(VENV)/.stamp-test $(SGLANG_VENV)/.stamp ## set up both environments, then check SGLang's contracts on CPU
	$(BIN)/python -m pytest -q tests/sglang

lint: $(VENV)/.stamp-dev ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

clean: ## remove caches and build output, keep the environment and results
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# hatchling comes first and from the same pins, so the build needs no second, unpinned environment.
$(VENV)/.stamp-test: $(REQUIREMENTS)
	@test -n "$(PYTHON)" || { echo "error: found no Python >= 3.11 with venv and pip;" \
	  "install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is not a Python >= 3.11; name one: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	test -x $(BIN)/pip || "$(PYTHON)" -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt hatchling editables
	$(PIP) install --progress-bar off --constraint constraints.txt --no-build-isolation --editable '.[test]'
	touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-test
	$(PIP) install --progress-bar off --constraint constraints.txt --no-build-isolation --editable '.[test,dev]'
	touch $@

$(SGLANG_VENV)/.stamp: tests/sglang/requirements-sglang-cpu.txt constraints.txt
	test -x $(SGLANG_VENV)/bin/pip || "$(PYTHON)" -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps --constraint constraints.txt torch
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps --requirement $<
	rm -rf $(SGLANG_VENV)/next
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps --no-compile --target $(SGLANG_VENV)/next sglang==0.5.23
	touch $@
