# `make demo` and `make test` work on a bare machine with python3, its venv module and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Python compiles a module when it is first imported, and keeps that: most of those that torch and others bring along
# never are, and compiling them all would take a minute of the installation.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lint format clean

demo: $(STAMP)
	$(BIN)/bsat demo

# In the order of tests/conftest.py.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) bsat-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -exec rm -rf {} +
