# Two commands to know: `make demo` runs the main job on an embedded Hub, `make test` runs the tests. Both set up first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test lint bench clean engine-tables

# The environment is as fresh as this stamp: made once, remade when pyproject.toml changes.
$(VENV)/.installed: pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed (PYTHON=...)" >&2; exit 2; }
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto --dist loadgroup

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python -m bench

# The gates of one engine release, asked of its own code: ENGINE_PYTHON is the python of an environment with that vllm.
engine-tables: $(VENV)/.installed
	$(BIN)/python -m formulas.live "$(ENGINE_PYTHON)"

clean:
	rm -rf $(VENV) .venv-plain .pytest_cache .mypy_cache .ruff_cache .hypothesis
