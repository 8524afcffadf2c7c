# All set-up goes through .venv/.ready; running a target again re-uses it.
# PYTHON=python3.12 chooses the interpreter, VENV=... the place of the environment.
VENV ?= .venv
READY := $(VENV)/.ready
LANES := $(VENV)/bin/python scripts/lanes.py

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format unit interp compile dist gpu venv clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(READY) ## set up and run the main job: tune, train two models on real text, and compare them
	@$(VENV)/bin/bakeoff demo

test: $(READY) ## set up, lint, and run every test lane that this machine can run
	@$(LANES) lint unit dist interp compile gpu

test-all: $(READY) ## the same with every exhaustive test: all configurations, more random examples
	@$(LANES) --all lint unit dist interp compile gpu

lint: $(READY) ## ruff, mypy, and the import layers
	@$(LANES) lint

format: $(READY) ## put the code into ruff's format and apply its safe fixes
	@$(VENV)/bin/ruff format . && $(VENV)/bin/ruff check --fix .

unit: $(READY) ## selector, configuration, data, training, command line, documents
	@$(LANES) unit

interp: $(READY) ## Triton kernels under the interpreter against the float64 references
	@$(LANES) interp

compile: $(READY) ## every kernel compiled ahead of time for four GPU generations
	@$(LANES) compile

dist: $(READY) ## several processes over gloo
	@$(LANES) dist

gpu: $(READY) ## the ops' grid on a CUDA device
	@$(LANES) gpu

venv: $(READY) ## set up only

$(READY): pyproject.toml $(wildcard constraints/*.txt) scripts/setup.sh
	@scripts/setup.sh "$(VENV)" "$(PYTHON)"

clean: ## remove the environment and everything that was built
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
