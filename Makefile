# make demo    loses a store and restores it, in a terminal; ARGS="--keep" keeps the data
# make dev     runs everything on this machine, with its own data; ARGS="--port 3001"
# make test    runs the tests in parallel; ARGS="-k sandbox" selects, ARGS="-n0" is sequential.
#              The TLS test needs openssl, the tests of the Dagster pages need Chromium, those of a
#              connection pooler need pgbouncer; without them, these tests are skipped.
# make test-disasters   runs the tests in which hosts and whole clusters fail, and those in which
#              work dies at each call of a server: twenty minutes
# make check   format, lint, types
#
# Needs Python 3.11, 3.12 or 3.13 with venv. All paths are relative, so the path of the checkout may
# contain a space.

SHELL := /bin/sh
PYTHON ?= python3
BIN := .venv/bin

# Each command and each run in Dagster is a new Python process. Some containers forbid bytecode
# files; then each process compiles the package again, which takes a quarter of its start.
unexport PYTHONDONTWRITEBYTECODE

# Tests mostly wait for servers: in sequence they use half a core. So there are more workers than
# cores. A worker gets whole files, which start their servers once. Files marked `slow` come first.
AT_ONCE := -n 5 --dist loadscope --no-loadscope-reorder -m "not alone and not disaster"
# Each disaster needs several servers and daemons, so fewer of them fit on one machine.
SOME_AT_ONCE := -n 3 --dist load
# Tests marked `alone` promise a short time, and run after the others. Without ARGS, only their
# files are read.
ALONE = $(shell grep -rl --include='*.py' 'pytest[.]mark[.]alone' tests)
# pytest exits with 5 if ARGS selects no test, which may happen in one of the two calls.
OR_NONE := || [ $$? -eq 5 ]
# In these, work dies or fails at each call of a server; `make test` takes every third one.
CRASHES := tests/integration/test_restore_crashes.py tests/integration/test_marker_crashes.py

.PHONY: demo dev test test-disasters check

demo: .venv/.installed
	@$(BIN)/budget-recovery demo $(ARGS)

dev: .venv/.installed
	@$(BIN)/budget-recovery dev $(ARGS)

test: .venv/.installed
	$(BIN)/python -m pytest $(AT_ONCE) $(ARGS) $(OR_NONE)
	$(BIN)/python -m pytest -m alone $(or $(ARGS),$(ALONE)) $(OR_NONE)

test-disasters: .venv/.installed
	$(BIN)/python -m pytest -m disaster $(SOME_AT_ONCE) $(ARGS)
	EVERY_BORDER=1 $(BIN)/python -m pytest $(CRASHES) $(SOME_AT_ONCE) $(ARGS) $(OR_NONE)

check: .venv/.installed
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

.venv/.installed: setup.py pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
		echo "$(PYTHON) is not installed; install Python 3.11, 3.12 or 3.13." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
		echo "$$($(PYTHON) --version) is not supported; choose Python 3.11, 3.12 or 3.13," \
			"as in: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "This Python lacks venv; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "Installing into .venv, which takes a minute or more ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
