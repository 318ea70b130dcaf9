# A fresh machine needs git, Python 3.11+ and make. Everything else is installed into .venv.
PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
# One thread per rank: several ranks on a small machine otherwise fight over the cores.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install demo proof test test-slow soak mutants test-engines test-transformers test-versions wheel bench docs lint format types clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

# What the demo needs, a small part of what developers need.
.venv/installed-for-demo: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[examples]'
	touch $@

install: .venv/installed ## create .venv and install everything

demo: $(if $(wildcard .venv/installed),.venv/installed,.venv/installed-for-demo) ## train a small GPT on two CPU processes, in under two minutes
	$(BIN)/python examples/text/train.py --accelerator cpu --devices 2 --steps 150

proof: .venv/installed ## the same loop on 1 to 4 processes, and killed: how far the numbers differ, in two minutes
	$(BIN)/python -m benchmarks.proof

# Three workers keep two cores busy, since many tests wait; a file's tests share its ranks and fixtures.
# Hundreds of processes import fabric: an empty variable lets Python keep the compiled files. Hydra's plugin is not used,
# and takes a second to import in each worker.
test: export PYTHONDONTWRITEBYTECODE =
test: .venv/installed ## everything but the slow, gpu and engines marks
	$(BIN)/python -m pytest -m "not slow and not gpu and not engines" -n 3 --dist loadfile \
	  --no-loadscope-reorder -p no:hydra_pytest

test-slow: .venv/installed ## samples of the fault matrix, crash points and long property profiles
	$(BIN)/python -m pytest -m "slow and not soak and not gpu and not engines" -n 2 --dist loadfile --timeout 600 --session-timeout 3600

soak: .venv/installed ## all of them: every fault, crash point, and example, in hours
	$(BIN)/python -m pytest -m "soak and not gpu and not engines" --timeout 1800

SEED ?= 7
COUNT ?= 60
mutants: .venv/installed ## change one line at a time, and count what the tests notice; FILES="fabric/data/loader.py" takes some
	$(BIN)/python -m tests.mutants --seed $(SEED) --count $(COUNT) $(if $(AGAIN),--again) $(FILES)

test-engines: .venv/installed ## jobs on real SLURM, MPI, Ray and two hosts, and real loggers; ENGINES="mpi" takes some
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python -m tests.engines $(ENGINES)

# The folder comes before .venv, also in the processes that tests start.
build/transformers4/installed: tests/transformers4.txt .venv/installed
	rm -rf build/transformers4
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --target build/transformers4 -r $<
	touch $@

test-transformers: build/transformers4/installed ## the tests with models of Hugging Face, with transformers 4.57, in two minutes
	PYTHONPATH=$(CURDIR)/build/transformers4 $(BIN)/python -m pytest -m "not gpu and not engines" -n 2 --dist loadfile \
	  -p no:hydra_pytest tests/test_transformers.py tests/test_finetune.py \
	  "tests/test_docs.py::test_the_blocks_of_a_page_run[docs/how-to/hugging-face.md]"

# The environments stay in the folder, for the next time. VERSIONS="newest 3.12-2.14" takes some of them.
FOLDER ?= build/versions
test-versions: .venv/installed ## make test with each supported Python and torch, ten minutes each; VERSIONS="newest" takes some
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python -m tests.versions --folder $(FOLDER) $(VERSIONS)

wheel: .venv/installed ## build the sdist and from it the wheel, install that without extras, train and save there
	rm -rf build/clean dist
	$(BIN)/python -m build > /dev/null
	$(BIN)/python .ci/archives.py dist
	$(PYTHON) -m venv build/clean
	build/clean/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt dist/*.whl
	cd dist && ../build/clean/bin/python ../.ci/clean_install.py
	cd dist && ../build/clean/bin/python ../examples/gan.py --accelerator cpu --devices 2 --epochs 1

bench: .venv/installed ## raw torch, fabric, lightning-fabric and accelerate side by side, in 25 minutes
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[benchmarks]'
	$(BIN)/python -m benchmarks

# Material's own notice of another project is no warning of ours.
docs: .venv/installed ## the documentation site, in build/site
	@$(BIN)/python -c 'import material, mkdocstrings' 2>/dev/null || \
	  { echo "make docs needs the extra docs: $(BIN)/pip install -c constraints.txt -e '.[docs]'"; exit 1; }
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "To read them, run this and open http://127.0.0.1:8000:"
	@echo "  $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000"

lint: .venv/installed ## ruff check and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/installed ## let ruff format and fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/installed ## pyright
	$(BIN)/pyright

clean: ## remove .venv and caches
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
