PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart benchmark test lint clean

# The environment is made again whenever the list of dependencies changes.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/python run.py +experiment=quickstart

benchmark: $(VENV)/.installed
	$(BIN)/python -m benchmarks $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

test: lint
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile

clean:
	rm -rf outputs build *.egg-info
