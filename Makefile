# The few words a developer types; CI types the same ones. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Extra words for pip, for instance an index that carries the CPU build of torch: see README, "Which torch".
PIP_ARGS ?=
STAMP := $(VENV)/.installed

.PHONY: help install run lint format test test-slow kernels-aot gpu soak clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP) ## make .venv and install Pagemill with its tools into it

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Pagemill needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12 install")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

run: install ## start Valkey and a worker, send a first message, keep serving
	@exec $(BIN)/pagemill serve --log-level warning --first-message "What is the capital of France?"

lint: install ## ruff, mypy strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install ## rewrite the code as ruff wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Processes that share the tests. Each computes on one thread, so that they don't take the cores from each other.
TEST_PROCESSES ?= 2

# Triton's kernels run by its interpreter in the tests, which it decides when it is imported.
test: install ## the whole suite but for what is marked slow
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TEST_PROCESSES) --dist worksteal -m "not slow and not gpu"

test-slow: install ## what takes minutes
	TRITON_INTERPRET=1 $(BIN)/pytest -m "slow and not gpu"

kernels-aot: install ## compile the Triton kernels for four generations of GPUs, none needed
	$(BIN)/python -m ops.kernels_aot

# A bare machine names its interpreter (`make gpu PYTHON=python3`): then nothing is installed. Other words for it, for
# instance GPU="--rehearse --out results".
GPU ?=
IS_PYTHON_NAMED := $(filter-out file,$(origin PYTHON))

gpu: $(if $(IS_PYTHON_NAMED),,install) ## what needs a CUDA device: kernels, engine, streams, bench; a table and a JSON file
	$(if $(IS_PYTHON_NAMED),$(PYTHON),$(BIN)/python) -m tests.gpu.check $(GPU)

# Other words for it, for instance SOAK="--seconds 60 --seed 7 --runs 20".
SOAK ?= --seconds 600

soak: install ## disturb workers for ten minutes, and check every reply
	$(BIN)/python -m tests.faults.soak $(SOAK)

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
