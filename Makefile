# Two commands: `make serve` answers on http://127.0.0.1:8000, `make test` runs the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
SENSORIUM_MEDIA ?= ../shared/media
export SENSORIUM_MEDIA

.PHONY: setup setup-test serve test test-slow lint format bench clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

setup-test: $(VENV)/.installed-test

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[test,bench]"
	touch $@

serve: setup
	$(BIN)/sensorium serve --host $(HOST) --port $(PORT) $(ARGS)

test: setup-test
	$(BIN)/python -P -m pytest -m "not slow and not gpu" $(ARGS)

test-slow: setup-test
	$(BIN)/python -P -m pytest -m "slow and not gpu" $(ARGS)

# mypy finds the root package under its import name through a link beside it.
lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p .types && ln -sfn .. .types/sensorium
	MYPYPATH=.types $(BIN)/mypy -p sensorium

format: setup-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup-test
	$(BIN)/sensorium bench speech $(ARGS)

clean:
	rm -rf $(VENV) .types build *.egg-info
