# make dev     everything on this machine, in an environment of its own; ARGS="--port 3001"
# make test    the tests; ARGS="-k sandbox". That of TLS needs openssl, those of the pages need
#              Chromium; they are skipped without.
# make check   format, lint, types
#
# Needs Python 3.11, 3.12 or 3.13 with venv, and nothing else. Paths are relative, so that the
# checkout's own may hold a space.

SHELL := /bin/sh
PYTHON ?= python3
BIN := .venv/bin

.PHONY: dev test check

dev: .venv/.installed
	@$(BIN)/budget-recovery dev $(ARGS)

test: .venv/.installed
	$(BIN)/python -m pytest $(ARGS)

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
