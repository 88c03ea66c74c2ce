# One place for the commands; CI runs `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test tests test-long lint bench bench-all docs site wheel clean

# Compiled modules are kept, whatever the shell says: hundreds of test processes import them.
export PYTHONDONTWRITEBYTECODE :=

# A virtual environment with the package and its development tools; made again when pyproject.toml changes.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(READY)

demo: $(READY)  ## train a small CNN on handwritten digits and classify the test images securely
	$(BIN)/python examples/digits.py

test: $(READY)  ## format, lint, types, tests with warnings as errors; types are checked beside the tests
	$(MAKE) --jobs=2 lint tests

tests: $(READY)  ## compiled loops once, before workers would each compile them
	$(BIN)/sectorch warm
	$(BIN)/python -m pytest -n 3 --dist worksteal

test-long: $(READY)  ## the longer profile: millions of samples, thousands of random programs
	$(BIN)/python -m pytest -n 3 --dist worksteal -m sectorch_long

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright -p . --pythonpath $(BIN)/python

bench: $(READY)  ## secure against plain for the papers' nets, in one run
	$(BIN)/python benchmarks/models.py

bench-all: $(READY)  ## every benchmark at its small size, one after the other; goes on where it was stopped
	$(BIN)/python benchmarks/all.py

docs: $(READY)  ## rewrite the generated tables and figures in docs/
	$(BIN)/python docs/generate.py

site: $(READY)  ## the documentation as a site in site/, warnings as errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(READY)  ## dist/sectorch-VERSION-py3-none-any.whl
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
