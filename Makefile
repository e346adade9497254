# `make demo` and `make test` do their own set-up; everything else is for people who work on the project.
BIN ?= .venv/bin
export MUJOCO_GL ?= egl
PROCESSES ?= $(shell echo $$(($$(nproc) * 3 / 2)))  # of tests, which wait for a fifth of their time

.DEFAULT_GOAL := help
.PHONY: help setup demo test check verify lint types layers format lock bundle clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

setup:  ## make .venv ready (seconds when nothing changed)
	@tools/setup

demo: setup  ## the main job: see a policy with memory choose right where one without guesses
	@$(BIN)/tracemem demo

test: setup  ## run every test
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

check: setup lint types layers  ## lint, formatting, types, layer rules

verify: setup  ## what takes too long for every change: clean installs, both ends of the version ranges, soak tests
	@$(BIN)/python tools/verify

lint:
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types:
	@$(BIN)/mypy

layers:
	@$(BIN)/lint-imports

format: setup  ## rewrite the code in the project's format
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

lock: setup  ## renew requirements.lock from pyproject.toml
	@$(BIN)/uv pip compile pyproject.toml --all-extras --group dev --no-annotate --no-header --python-version 3.12 --upgrade -q -o requirements.lock

bundle: setup  ## pack what an air-gapped GPU machine needs into .offline/ (docs/offline-gpu.md)
	@$(BIN)/python tools/bundle .offline

clean:  ## remove the environment and caches, keep results
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
