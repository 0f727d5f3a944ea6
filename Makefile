# `make run` sets up and runs the main job on the shipped model; `make test` passes the tests. Both from a bare clone.
# Everything is installed into .venv; a stamp inside it says what is there, so a second call starts at once.

PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,\
  $(shell $(p) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $(p))))
PROMPT ?= Tell me a short story about a fox.
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-input
READY := .venv/.ready
DEV := .venv/.dev

.PHONY: run dev test fast lint types bench soak sanitize size wheel clean
.DEFAULT_GOAL := run

run: $(READY)
	@$(BIN)/coli run "$(PROMPT)"

dev: $(DEV)

test: lint
	$(BIN)/python -m pytest

fast: $(DEV)
	$(BIN)/python -m pytest -m "not slow"

lint: $(DEV)
	$(BIN)/ruff check .

types: $(DEV) # mypy sees no packages that pyproject maps from elsewhere, so it gets one tree of links
	@rm -rf build/types && mkdir -p build/types/coli
	@ln -s $(CURDIR)/coli/* $(CURDIR)/commands $(CURDIR)/kernels $(CURDIR)/shaders build/types/coli/
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml

bench: $(DEV)
	$(BIN)/python -m tests.bench

soak: $(DEV) # a million tokens with drafts against plain decoding
	$(BIN)/python -m tests.soak

sanitize: $(DEV) # kernels with Numba's bounds checks, in a cache of their own, and buffers between forbidden pages
	cache=$$(mktemp -d) && trap 'rm -rf "$$cache"' EXIT && export COLI_CACHE="$$cache" NUMBA_BOUNDSCHECK=1 && \
	  $(BIN)/python -m tests.fence start && $(BIN)/python -m tests.fence end

size: # lines of code by room
	@for room in coli commands kernels shaders tests; do \
	  printf '%-10s %6d lines\n' $$room $$(find $$room -name '*.py' -exec cat {} + | wc -l); done

wheel: $(DEV)
	@rm -rf build/lib build/bdist.* && mkdir -p dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "coli: no Python 3.11, 3.12 or 3.13 found (install one, or: make PYTHON=/path/to/python3)" >&2; exit 2; }
	@echo "setting up .venv with $$($(PYTHON) --version)" >&2
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "coli: $(PYTHON) cannot make a virtual environment (Debian: apt-get install python3-venv)" >&2; exit 2; }

$(READY): pyproject.toml | .venv/bin/python
	@echo "installing coli into .venv" >&2
	@$(PIP) --editable ".[serve]"
	@touch $@

$(DEV): pyproject.toml | .venv/bin/python
	@echo "installing coli and its tools into .venv" >&2
	@$(PIP) --editable ".[dev]"
	@touch $@ $(READY)
