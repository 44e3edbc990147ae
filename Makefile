# make demo         watch a classifier adapt and ask for few labels
# make test         every fast check: lint, format, types, imports, doctests, tests
# make test-heavy   the tests that take long or need more than Python
# make docs         the documentation, into site/
# make screenshots  the pictures of the service's pages in the documentation, from a service that runs (needs chromium)
# make clean        remove what the tools left behind; the environment stays
#
# Each target first puts what it needs into VENV and skips that while pyproject.toml is unchanged.
# PYTHON=… picks the interpreter, VENV=… the environment, ARGS=… goes to `wise-atta demo`.

SHELL := bash
.SHELLFLAGS := -o pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: demo test lint types imports unit test-heavy docs screenshots clean

demo: $(VENV)/.installed-bench
	$(BIN)/wise-atta demo $(ARGS)

test: lint types imports unit

lint: $(VENV)/.installed-dev
	@echo "== lint and format"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	@echo "== types"
	$(BIN)/mypy

imports: $(VENV)/.installed-dev
	@echo "== import direction"
	$(BIN)/lint-imports --no-logo

unit: $(VENV)/.installed-dev
	@echo "== doctests and tests"
	$(BIN)/pytest -m "not heavy and not gpu"

# Each test has its own limit (pyproject.toml); the session limit holds for all of them together, in seconds.
test-heavy: $(VENV)/.installed-dev
	@echo "== heavy tests"
	$(BIN)/pytest -m "heavy and not gpu" --session-timeout=420

docs: $(VENV)/.installed-dev
	$(BIN)/mkdocs build --strict

screenshots: $(VENV)/.installed-dev
	$(BIN)/python docs/screenshots.py

clean:
	rm -rf site dist demo .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -path './$(VENV)' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed-%: pyproject.toml | $(BIN)/pip
	@echo "Installing wise-atta[$*] into $(VENV). PyTorch is large: the first time takes some minutes."
	@$(BIN)/pip install -e ".[$*]" | awk \
	  '/Downloading .*MB\)/ { print "  " $$1, $$2, $$3, $$4; fflush() } \
	   /^Installing collected/ { print "  Unpacking", NF - 3, "packages"; fflush() }'
	@touch $@

# pip is what a virtual environment gets last, so one that was broken off half way is completed here.
$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { echo "wise-atta needs Python 3.11 or newer: no $(PYTHON) on the path" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("wise-atta needs Python 3.11 or newer, but $(PYTHON) is " \
	  + sys.version.split()[0] + ": install a newer one and name it, as in: make demo PYTHON=python3.12")'
	@echo "Creating the environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
