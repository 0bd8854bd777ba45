# Everything that people and CI run. It needs make and Python 3.11 or newer with venv; no root, no Docker, no running service.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
# What pip says of each time that it installed something there: `make audit` reads it.
REPORTS := $(VENV)/reports
ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
# The first interpreter that can serve; say PYTHON=… to choose. Each is tried by running it: a shim may exist and not work.
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$python -c '$(ENOUGH)' 2>/dev/null && { echo $$python; break; }; done)
# More for pip, such as --index-url for a CPU-only build of torch.
PIP_ARGS ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Three files of tests at a time, also on two cores: much of what they do is to wait, for leases and for jobs to end.
WORKERS ?= 3
# Two cores and up to two ranks: a thread each, or they fight over the cores. Files as they come: the longest are first.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help install dev demo example serve test faults bench check audit format openapi lock clean

help: ## Say what there is
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

install: $(VENV)/installed ## Make .venv with what the service needs, at the versions tested together
dev: $(VENV)/installed-dev ## The same, with what tests and checks need

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "No Python 3.11 or newer with the venv module was found. Install one (Debian: python3 python3-venv)," \
			"or name it: make PYTHON=/path/to/python3.11 …" >&2; exit 1; fi
	@$(PYTHON) -c '$(ENOUGH)' || { \
		echo "$(PYTHON) is not Python 3.11 or newer with the venv module (Debian: python3-venv)." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV); the first time takes a few minutes."
	@mkdir -p $(REPORTS)
	$(PIP) install --quiet $(PIP_ARGS) --constraint constraints.txt --report $(REPORTS)/$$(date +%s).json --editable '.[engine]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@mkdir -p $(REPORTS)
	$(PIP) install --quiet $(PIP_ARGS) --constraint constraints.txt --report $(REPORTS)/$$(date +%s)-dev.json --editable '.[dev]'
	@touch $@

demo: install ## Train a model from text, fine-tune it and chat with it, all over HTTP
	$(BIN)/python examples/demo.py

example: dev ## Run one of examples/: make example NAME=finetune_smollm2 ARGS=--short
	$(BIN)/python examples/$(NAME).py $(ARGS)

serve: install ## All of it on this machine, in the foreground
	$(BIN)/trainshed serve

test: dev ## Everything, against real Valkey, PostgreSQL, Celery and ranks. ARGS=… goes to pytest, WORKERS=0 runs one at a time
	$(PYTEST) $(ARGS)

faults: dev ## All drills on the running service, long ones too, one at a time; half an hour, or three quarters beside other work. ARGS="-k kill" runs some
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "" tests/faults $(ARGS)

bench: dev ## Training steps a second beside a plain transformers loop; about 4 minutes of an idle machine
	$(BIN)/python -m benchmarks.train_speed $(ARGS)

check: dev ## Lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

audit: dev ## What was installed is to the bit what is pinned; and has no known vulnerability, where PyPI tells
	$(BIN)/python .ci/audit.py $(REPORTS)

format: dev ## Mend what can be mended by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

openapi: install ## Write docs/openapi.json anew from the code
	$(BIN)/python -m api.openapi > docs/openapi.json.new
	mv docs/openapi.json.new docs/openapi.json

lock: ## Resolve constraints.txt anew, to the newest versions that fit together, and look up their hashes
	$(PYTHON) .ci/lock.py

clean: ## Remove what was made here; data of a service stays
	rm -rf $(VENV) .demo .examples build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
