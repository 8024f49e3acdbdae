# make quickstart    adapt, convert, bundle and reload a real BERT on real sentences; results in quickstart/
# make test          the tests, on all cores, in some minutes; ends with the ten slowest
# make test-all      all of them: also slow ones, those of the papers' experiments, and every combination
# make test-rest     what `make test` leaves out
# make test-bits     adapters on a base in 4 and 8 bits: bitsandbytes and torchao beside the environment, which they slow down
# make lint          ruff (lint and format) and mypy
# make docs          the pages of docs/, strictly: a broken link or an unknown name is an error; result in build/docs
# make benchmarks    speed and size; results in recipes/benchmarks/results/
# make experiments   the papers' experiments, as far as ARGS="--minutes 60 --data path/to/data" allow; pages in model_cards/
# make gpu           tests, training and speed on a GPU, in less than ten minutes; results in gpu/
# make clean         remove the virtual environment, caches and results of quickstart and gpu
#
# Each target first makes the virtual environment it needs, once. Settings, all optional:
#   PYTHON=python3.12                        the interpreter (3.10 or newer)
#   PIP_ARGS="--index-url https://..."       where pip looks; an index with CPU builds of torch saves gigabytes
#   ARGS="-k bundle"                         more arguments for pytest or the quickstart; ARGS="-n 0" is one process

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
ARGS ?=
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

# These need trained models and data: run them by hand, with the options that they name.
BY_HAND := %/convert_models.py %/export_latency.py %/lowrank_compress.py %/calibrate_memory.py \
	%/head_beside_lora.py %/kernel_sizes.py %/attention_on_gpu.py
BENCHMARKS := $(filter-out $(BY_HAND),$(wildcard recipes/benchmarks/[a-z]*.py))

export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: quickstart test test-all test-rest test-bits lint docs benchmarks experiments gpu clean

quickstart: $(VENV)/.demo
	$(BIN)/python recipes/quickstart.py --out quickstart --overwrite $(ARGS)

REST := slow or papers or product
PYTEST = $(BIN)/python -m pytest -n auto --dist worksteal --durations=10

test: $(VENV)/.dev
	$(PYTEST) -m "not ($(REST))" $(ARGS)

test-rest: $(VENV)/.dev
	$(PYTEST) -m "$(REST)" $(ARGS)

test-all: $(VENV)/.dev
	$(PYTEST) $(ARGS)

test-bits: $(VENV)/.bits
	PYTHONPATH=$(VENV)/bits $(BIN)/python -m pytest tests/package/test_quantized_base.py $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open build/docs/index.html"

benchmarks: $(VENV)/.dev
	set -e; for program in $(BENCHMARKS); do $(BIN)/python $$program $(ARGS); done

experiments: $(VENV)/.dev
	$(BIN)/python recipes/papers/run_experiments.py $(ARGS)

# Needs a build of torch for the GPU, PyPI's on Linux. Otherwise the environment can be any: make gpu VENV=path/to/it
gpu: $(VENV)/.dev
	$(BIN)/python recipes/gpu.py $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache build dist
	rm -rf quickstart gpu
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp says which extra is installed; it is older than pyproject.toml when that has changed.
$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/.made
	$(INSTALL) -e '.[demo]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.made
	$(INSTALL) -e '.[dev]'
	touch $(VENV)/.demo $@

$(VENV)/.bits: $(VENV)/.dev
	$(INSTALL) --no-deps --target $(VENV)/bits --upgrade bitsandbytes torchao
	touch $@

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "%s is Python %d.%d; 3.10 or newer is needed: make PYTHON=..." % (sys.executable, *sys.version_info[:2]))'
	$(PYTHON) -m venv $(VENV)
	touch $@
