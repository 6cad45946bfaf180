# make demo    train a small GPT on 8 local processes (first run: installs everything into .venv)
# make test    the test suite, without what is marked slow
# make lint    style and types
# make docs    the documentation as a site, in site/
#
# VENV=some/folder   use another environment      PYTHON=python3.12   make it with this Python
# TESTS="packages/mesh -k layout"   run only these tests      WORKERS=6   in so many processes, of 2.5 GB each

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all lint format docs clean

VENV ?= .venv
TESTS ?= integration_tests packages
WORKERS ?= 3
packages := $(patsubst packages/%/pyproject.toml,%,$(wildcard packages/*/pyproject.toml))

# Three processes unless WORKERS says otherwise, each with files of its own, in this order: most tests use one core at a time, and
# the longest files come first, so that no process waits for one at the end. Three on two cores, because tests wait for ranks and
# programs that start: all took 697 s, where two processes took 826.
workers := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# The first of these that is Python 3.11 or later; a recipe says so where there is none.
recent = import sys; sys.exit(sys.version_info < (3, 11))
candidates := python3 python3.14 python3.13 python3.12 python3.11 python
PYTHON ?= $(shell for python in $(candidates); do \
	$$python -c '$(recent)' >/dev/null 2>&1 && { echo $$python; break; }; done)

venv_python := $(VENV)/bin/python
installed := $(VENV)/.installed
pip := $(venv_python) -m pip --disable-pip-version-check --quiet

# Every folder without its extras first: pip looks in a folder for what a sibling requires only if it is named like that.
editable := $(packages:%=--editable packages/%) \
	$(foreach package,$(filter-out meshfold,$(packages)),--editable 'packages/$(package)[test]')

# pip would compile 17,000 files, half of the time that it takes. A fourth of them is ever imported: most of that here, once,
# and not by several processes at the same time.
compiled = import lightning, matplotlib.figure, numba, torch._dynamo, transformers.modeling_utils; \
	import diffusers.models.unets.unet_2d_condition, meshfold.cli.train, meshfold.train.loop, meshfold.planner.planner

help:
	@sed -n 's/^# //p;/^$$/q' Makefile

# The stamp is the last thing written: a broken install is tried again, a finished one costs nothing.
$(installed): constraints.txt $(packages:%=packages/%/pyproject.toml)
	@$(or $(PYTHON),false) -c '$(recent)' >/dev/null 2>&1 || { \
		echo "Meshfold needs Python 3.11 or later. Tried: $(or $(PYTHON),$(candidates))."; \
		echo "Install one, or name one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; } >&2
	@$(venv_python) -m pip --version >/dev/null 2>&1 || { \
		echo "Making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing Meshfold and its pinned dependencies (a few minutes the first time)"
	@$(pip) install --no-compile --prefer-binary --constraint constraints.txt hatchling
	@$(pip) install --no-compile --prefer-binary --constraint constraints.txt --no-build-isolation \
		$(editable) --editable 'packages/meshfold[all,lint,test]'
	@PYTHONDONTWRITEBYTECODE= $(venv_python) -c '$(compiled)'
	@touch $@

install: $(installed)

demo: $(installed)
	@$(VENV)/bin/meshfold demo

# The hundreds of processes that tests start import what the first of them compiled.
test test-all: export PYTHONDONTWRITEBYTECODE :=

test: $(installed)
	@$(venv_python) -m pytest $(workers) -m "not slow" $(TESTS)

test-all: $(installed)
	@$(venv_python) -m pytest $(workers) --hypothesis-profile explore \
		--matrix-results integration_tests/results/matrix.jsonl $(TESTS)

lint: $(installed)
	@$(venv_python) -m ruff check .
	@$(venv_python) -m ruff format --check .
	@$(venv_python) -m mypy

format: $(installed)
	@$(venv_python) -m ruff check --fix-only .
	@$(venv_python) -m ruff format .

# Its tools are installed when it is first asked for.
$(VENV)/.installed-docs: $(installed)
	@$(pip) install --prefer-binary --constraint constraints.txt --no-build-isolation --editable 'packages/meshfold[docs]'
	@touch $@

docs: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(venv_python) -m mkdocs build --strict --quiet
	@echo "site/index.html; its search needs a server: python -m http.server --directory site"

clean:
	rm -rf .venv demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
