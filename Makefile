# Two commands for a newcomer, on a fresh machine: `make app` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# a file's tests share what they record; in the order of the files, so that the long ones do not all come last
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

# Tests start many processes, and each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: app test test-all style lint format sample-runs clean

app: $(VENV)/.installed
	$(BIN)/routescope app

test: $(VENV)/.installed-test
	sh tests/browser/install_chromium.sh
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

test-all: $(VENV)/.installed-test
	sh tests/browser/install_chromium.sh
	$(BIN)/python -m pytest $(PARALLEL)

style: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sample-runs: $(VENV)/.installed
	ROUTESCOPE="$(abspath $(BIN)/routescope)" sample_runs/record.sh

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch first and alone: asked for together with others, pip may settle on another build of it
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): a few minutes the first time."
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) --editable '.[test,lint,hf]'
	@touch $@
