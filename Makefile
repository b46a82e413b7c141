# Each target makes .venv by itself when it is missing, and again when pyproject.toml or constraints.txt changed.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
NOTEBOOKS = $(wildcard notebooks/*.ipynb)
# One benchmark, or several: make bench BENCH=planner. To see that it runs: make bench QUICK=1
BENCH ?=
COMPARED := $(VENV)/.benchmarks-installed

.PHONY: demo test lint format bench notebooks soak
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(PY) -m graphs.demo

test: $(INSTALLED)
	$(PY) -m pytest -q -m "not slow"

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(COMPARED)
	$(PY) -m tests.benchmarks $(BENCH) $(if $(QUICK),--quick)

notebooks: $(INSTALLED)
	set -e; for notebook in $(NOTEBOOKS); do $(VENV)/bin/jupyter-execute --inplace $$notebook; done

soak: $(INSTALLED)
	$(PY) -m pytest -q -m slow --timeout 3600
	$(PY) -m tests.soak_data_plane

# Where Python comes without its bundled pip (Debian's python3), the pip beside it fills the environment.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("make PYTHON=...: Python 3.10 or newer is needed" if sys.version_info < (3, 10) else 0)'
	if $(PYTHON) -m venv --clear $(VENV) >/dev/null 2>&1; then pip="$(PY) -m pip"; \
	else $(PYTHON) -m venv --clear --without-pip $(VENV) && pip="$(PYTHON) -m pip --python $(PY)"; fi; \
	$$pip install --quiet -c constraints.txt -e '.[demo,notebooks,test]'
	touch $@

# What the benchmarks compare with. Where it cannot be installed, they say so and measure the rest.
$(COMPARED): $(INSTALLED) tests/benchmarks/requirements.txt
	pip="$(PY) -m pip"; $$pip --version >/dev/null 2>&1 || pip="$(PYTHON) -m pip --python $(PY)"; \
	$$pip install --quiet -c constraints.txt -r tests/benchmarks/requirements.txt && touch $@ || echo "measuring without them"
