# One place for the commands; CI runs `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-long lint bench docs clean

# A virtual environment with the package and its development tools; made again when pyproject.toml changes.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(READY)

demo: $(READY)  ## train a small CNN on handwritten digits and classify the test images securely
	$(BIN)/python examples/digits.py

test: $(READY) lint  ## format, lint, tests with warnings as errors
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-long: $(READY)  ## the longer profile: millions of samples, thousands of random programs
	$(BIN)/python -m pytest -n 2 --dist worksteal -m long

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

bench: $(READY)  ## secure against plain for the papers' nets, in one run
	$(BIN)/python benchmarks/models.py

docs: $(READY)  ## rewrite the generated tables in docs/
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
