PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests wait for processes that they start, so there are more of them at once than cores.
WORKERS = $(shell $(BIN)/python -c "import os; print(min(8, 3 * os.cpu_count() // 2))")

.PHONY: quickstart benchmark test lint docs clean

# The environment is made again whenever the list of dependencies changes: .core has what the program needs, .installed
# also what its extras and tests need.
$(VENV)/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing PyTorch and other dependencies into $(VENV), which takes minutes"
	$(BIN)/python -m pip install --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

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

# The linters are one process each, so that two cores share them.
test: $(VENV)/.installed
	$(MAKE) --jobs=2 lint docs
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder -rfEs

# Runs, records and corpora in outputs/ are results, which no target deletes.
clean:
	rm -rf build site *.egg-info
