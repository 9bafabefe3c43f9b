PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests wait for processes that they start, so there are more of them at once than cores.
WORKERS = $(shell $(BIN)/python -c "import os; print(min(8, 3 * os.cpu_count() // 2))")

.PHONY: quickstart benchmark test lint docs clean

# The environment is made again whenever the list of dependencies changes: .core has what the program needs, .installed
# also what its extras and tests need, .compiled the bytecode of all that.
$(VENV)/.core: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing PyTorch and other dependencies into $(VENV), which takes minutes"
	$(BIN)/python -m pip install --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing PyTorch and all other dependencies into $(VENV), which takes minutes"
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $(VENV)/.core $@

# Some packages have files that are no Python of this version; what is not compiled here is when it is imported.
$(VENV)/.compiled: $(VENV)/.installed
	$(BIN)/python -m compileall -q $(VENV)/lib landmark tests >/dev/null || true
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

quickstart: $(VENV)/.core
	$(BIN)/python run.py +experiment=quickstart

benchmark: $(VENV)/.installed
	$(BIN)/python -m benchmarks $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

# A page that links to nothing is an error; with --quiet mkdocs would not count it.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The linters are one process each: beside them another core makes the site and compiles what the tests import.
test: $(VENV)/.installed
	$(MAKE) --jobs=2 lint docs $(VENV)/.compiled
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder -rfEs

# Runs, records and corpora in outputs/ are results, which no target deletes.
clean:
	rm -rf build site *.egg-info
