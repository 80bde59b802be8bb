# `make demo` and `make test` do all of their own set-up. They need Python 3.10 or newer, and root to save kernels.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: help demo test lint bench bench-store setup clean

help:
	@echo 'make demo    run the example notebook: build state, save it, break it, restore it'
	@echo 'make test    check the code, and run every test that this machine can run'
	@echo 'make lint    only check the code'
	@echo 'make bench   measure saves and restores beside criu by hand'
	@echo 'make bench-store  measure the store beside cp, tar, and (where they are installed) restic and borg'
	@echo 'make setup   only what these need: packages in .venv, and CRIU for you alone'
	@echo 'make clean   remove .venv and what the tools left here'

demo: setup
	@$(BIN)/python examples/demo.py

test: lint setup
	@test -e /dev/nvidiactl || echo 'No NVIDIA GPU here: the tests marked gpu will not run.'
	@$(BIN)/python -m pytest

lint: $(READY)
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy

bench: setup
	@$(BIN)/python -m benchmarks.kernel

bench-store: setup
	@$(BIN)/python -m benchmarks.store

# Asked for every time, since CRIU lies outside of this folder; where it is there already, that takes a moment.
setup: $(READY)
	@$(BIN)/jupyter gpuckpt setup

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo 'Python 3.10 or newer is needed, and "$(PYTHON)" is not. Name another: make PYTHON=python3.12'; exit 1; }
	@echo 'Installing packages into .venv (a minute or two, once) ...'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(MAKE) --no-print-directory new-venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]'
	@touch $@

# Debian keeps a part of Python's venv in a package of its own.
.PHONY: new-venv python3-venv
new-venv:
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(MAKE) --no-print-directory python3-venv
	@$(PYTHON) -m venv --clear .venv

python3-venv:
	@test "$$(id -u)" = 0 && command -v apt-get >/dev/null || \
		{ echo 'Python lacks its module ensurepip. As root: apt-get install python3-venv'; exit 1; }
	@echo 'Python needs python3-venv to make .venv; installing it ...'
	@apt-get update -qq
	@DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3-venv >/dev/null

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
