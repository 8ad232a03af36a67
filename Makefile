# The tasks of this project. `make` alone lists them.
#
#   PYTHON=python3.12   the interpreter that creates the environment (default: python3)
#   VENV=folder         where the environment lives (default: .venv)
#   VENV=none           create and install nothing: run everything with $(PYTHON) as it is. For images that come with
#                       CUDA builds of torch, fbgemm_gpu and torchrec, or that have no network.
#                       (VENV may also be set in the shell's environment.)

PYTHON ?= python3
VENV ?= .venv

# `make test` fails when fewer tests than this ran, so that a broken import or marker cannot pass for success.
MIN_TESTS ?= 5150

ifeq ($(VENV),none)
PY := $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

# Tests run in two processes; empty for an image without pytest-xdist.
SPREAD ?= -n 2 --dist worksteal

# torch and numba have thread pools of their own. A pool that spins at its barriers takes the cores from the other one.
export OMP_WAIT_POLICY ?= passive
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help setup demo test test-gpu memcheck check format bench docs wheel matrix

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '!seen[$$1]++ { printf "make %-9s %s\n", $$1, $$2 }'

ifeq ($(VENV),none)
setup: ## create the environment, install everything, print the versions
	$(PY) tools/setup.py none
else
setup: $(READY) ## create the environment, install everything, print the versions

$(READY): pyproject.toml tools/setup.py
	$(PYTHON) tools/setup.py $(VENV)
	@touch $@
endif

demo: $(READY) ## train the MovieLens example on two CPU processes
	$(PY) -m torch.distributed.run --standalone --nproc_per_node 2 examples/movielens.py

test: $(READY) ## run all tests that need no GPU
	$(PY) -m pytest tests -m "not cuda" --min-tests=$(MIN_TESTS) $(SPREAD)

test-gpu: $(READY) ## run the CUDA tests, one line per suite
	$(PY) tools/test_gpu.py

memcheck: $(READY) ## run the kernels' CUDA tests under compute-sanitizer
	$(PY) tools/test_gpu.py --sanitize

check: $(READY) ## lint, format, types, layers, sizes
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -q tests/project/test_layers.py tests/project/test_file_sizes.py

wheel: $(READY) ## build the wheel, and run the demo from it in an environment of its own
	$(PY) tools/check_wheel.py

format: $(READY) ## rewrite the sources the way `make check` wants them
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(READY) ## run the benchmarks
	$(PY) -m benchmarks

docs: $(READY) ## check the links of README and docs/, run their Python examples, build the site into build/site
	$(PY) tools/check_docs.py
	$(PY) -c "import furo, myst_parser, sphinx" || { echo "the site needs what pip install '.[docs]' brings"; exit 1; }
	$(PY) -m sphinx --fail-on-warning --keep-going --quiet --fresh-env -d build/doctrees docs build/site

# The interpreters and releases of torch that `make matrix` runs.
PYTHONS ?= $(PYTHON)
TORCH ?= 2.11 2.12 2.13 2.14

matrix: ## run sharding, state_dict and table tests under other releases, one environment at a time
	$(PYTHON) tools/matrix.py --pythons $(PYTHONS) --torch $(TORCH)
