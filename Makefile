# make demo    a store is lost and brought back, in a terminal; ARGS="--keep" keeps the data
# make dev     everything on this machine, in an environment of its own; ARGS="--port 3001"
# make test    the tests, several at a time; ARGS="-k sandbox", or ARGS="-n0" for one after the
#              other. That of TLS needs openssl, those of the pages need Chromium; they are skipped
#              without.
# make test-disasters   those in which hosts and whole clusters fail, which takes minutes
# make check   format, lint, types
#
# Needs Python 3.11, 3.12 or 3.13 with venv, and nothing else. Paths are relative, so that the
# checkout's own may hold a space.

SHELL := /bin/sh
PYTHON ?= python3
BIN := .venv/bin

# Every command, and every run in Dagster, is a Python of its own. Compiling the package in each
# takes a quarter of its start; some containers ask for that.
unexport PYTHONDONTWRITEBYTECODE

# Tests mostly wait for servers: one after the other they use half a core, so that there are more
# workers than two cores ask for. They get whole files, which start their own servers once, in the
# order of the directories: otherwise those with the most tests would come first, and last the few
# that take long. What promises a short time waits until the others are done.
AT_ONCE := -n 6 --dist loadscope --no-loadscope-reorder -m "not alone and not disaster"
# pytest says 5 where ARGS leaves it no test, as it may do for one of the two.
OR_NONE := || [ $$? -eq 5 ]

.PHONY: demo dev test test-disasters check

demo: .venv/.installed
	@$(BIN)/budget-recovery demo $(ARGS)

dev: .venv/.installed
	@$(BIN)/budget-recovery dev $(ARGS)

test: .venv/.installed
	$(BIN)/python -m pytest $(AT_ONCE) $(ARGS) $(OR_NONE)
	$(BIN)/python -m pytest -m alone $(ARGS) $(OR_NONE)

test-disasters: .venv/.installed
	$(BIN)/python -m pytest -m disaster $(ARGS)

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
	@echo "Installing into .venv, which takes about a minute ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
