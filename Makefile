# Set-up and chores, all inside ./.venv. Needs only make, pip and Python 3.11 or newer; PYTHON names
# the Python that makes .venv. Stamp files in .venv remember what is installed, so a second call
# starts at once; a changed pyproject.toml installs again.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Python compiles what it imports, at its first import; to compile all that is installed takes 9 s
# and 40 MB more. Where the environment forbids it to keep the result, every start is 1 s slower.
PIP := $(PY) -m pip install --quiet --no-compile --disable-pip-version-check
unexport PYTHONDONTWRITEBYTECODE
ARGS ?=
# Tests go in as many processes as there are cores, up to eight; ARGS="-n 0" is one, for a debugger.
PYTEST := $(PY) -m pytest -q -n auto --maxprocesses 8 --dist worksteal

.NOTPARALLEL:
.PHONY: help demo test dev check lint format clean

## help     say what each of these does
help:
	@sed -n 's/^## /make /p' Makefile

## demo     train a small GPT on text this machine already has, then sample from it
demo: $(VENV)/.installed
	$(VENV)/bin/forge train configs/demo.toml $(ARGS)

## test     run the tests; ARGS="-k tape" picks some
test: $(VENV)/.installed-test
	$(PYTEST) $(ARGS)

## dev      install what a contributor needs (PyTorch, ruff, mypy) and the pre-commit hooks
dev: $(VENV)/.installed-dev

## check    what CI runs: the tests, the comparisons with PyTorch, lint and types
check: dev lint test

## lint     check style, format and types
lint: $(VENV)/.installed-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

## format   put the code in its format, and fix what ruff can
format: $(VENV)/.installed-dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

## clean    remove .venv, caches and build outputs; your runs/ stay
clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -type d -name __pycache__ -prune -exec rm -rf {} +

NO_PYTHON = no $(PYTHON) here: install Python 3.11 or newer, or name one (make PYTHON=python3.12)
OLD_PYTHON = $(PYTHON) is older than 3.11: install a newer one and name it (make PYTHON=python3.12)
NO_VENV = $(PYTHON) has no working venv module: install it (Debian: apt install python3-venv)
fail = { echo "make: $(1)" >&2; exit 1; }

# Debian and Ubuntu have Python without ensurepip, where `python3 -m venv` fails halfway: ask first.
$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || $(call fail,$(NO_PYTHON))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || $(call fail,$(OLD_PYTHON))
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call fail,$(NO_VENV))
	@$(PYTHON) -m venv $(VENV) || $(call fail,$(NO_VENV))
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.made
	@echo "Setting up $(VENV) (the first time takes about a minute) …"
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.made
	@echo "Setting up $(VENV) with the test tools (the first time takes about a minute) …"
	@$(PIP) -e '.[test]'
	@touch $(VENV)/.installed $@

# Hooks only in a clone of one's own: not in CI, and not where git is told to look elsewhere.
$(VENV)/.installed-dev: pyproject.toml $(VENV)/.made
	@echo "Setting up $(VENV) with PyTorch and the linters (1 GB, some minutes) …"
	@$(PIP) -e '.[dev]'
	@if [ -e .git ] && [ -z "$$CI" ] && command -v git >/dev/null \
	  && ! git config core.hooksPath >/dev/null; then $(PY) -m pre_commit install; fi
	@touch $(VENV)/.installed $(VENV)/.installed-test $@
