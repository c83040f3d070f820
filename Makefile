# Every verb does its own set-up; `make` alone lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help install demo test test-kernels notebooks test-stateful test-faults test-zoo test-gpu test-gpu2 test-vllm test-vllm-ci test-vllm-zoo lint docs wheel format bench-cpu bench-gpu clean

help: ## List the verbs
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## Create .venv and install kvrecall with all development tools
	@echo "kvrecall is installed in $(VENV)"

$(STAMP): pyproject.toml scripts/install.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/install.sh
	@touch $@

demo: $(STAMP) ## Ask a small model questions about a long document (ARGS="--all" for every question)
	@$(BIN)/python -m scripts.offline_models
	@$(BIN)/kvrecall demo $(ARGS)

# One thread per process: several that each take all cores wait for one another. Bytecode is kept: tests start many processes,
# each of which would compile the package anew.
PARALLEL := OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
WORKERS  ?= -n auto --maxprocesses 4 --dist worksteal
SLOWEST  := --durations=10 --durations-min=1

# Whether Triton interprets kernels is decided when it is imported, so those tests have a run of their own. The whole suite needs
# two models. They are fetched while tests are collected and others run; a test that needs one waits, or says why it is missing.
test: $(STAMP) ## Run the test suite (ARGS="-k name" to choose, WORKERS= for one process)
	$(if $(ARGS),,$(BIN)/python -m scripts.offline_models smollm2-135m qwen2.5-coder-0.5b >/dev/null 2>&1 &) \
	$(PARALLEL) $(BIN)/python -m pytest -q $(WORKERS) $(SLOWEST) -m "not kernels" --ignore=tests/interpreted $(NOTEBOOKS) $(ARGS)
	$(PARALLEL) TRITON_INTERPRET=1 $(BIN)/python -m pytest -q $(WORKERS) $(SLOWEST) tests/interpreted

test-kernels: $(STAMP) ## Compile every kernel for the head sizes that the test suite leaves out
	$(PARALLEL) $(BIN)/python -m pytest -q $(WORKERS) $(SLOWEST) -m kernels tests/engine $(ARGS)

# They are documentation, and `make test` has the tests of all that they call.
NOTEBOOKS := --deselect tests/examples/test_notebooks.py::test_all_cells_run

notebooks: $(STAMP) ## Run the cells of the notebooks in examples/ on a small model
	$(PARALLEL) $(BIN)/python -m pytest -q tests/examples/test_notebooks.py

test-stateful: $(STAMP) ## Random operations on layers, 10,000 for every method (OPERATIONS=1000 for fewer)
	$(PARALLEL) KVRECALL_STATEFUL_OPERATIONS=$(or $(OPERATIONS),10000) $(BIN)/python -m pytest -q -rP $(WORKERS) tests/stateful $(ARGS)

test-faults: $(STAMP) ## Memory refused at every allocation, exceptions at 1,000 random moments (MOMENTS=100 for fewer)
	$(PARALLEL) KVRECALL_REFUSALS=all KVRECALL_INTERRUPTS=$(or $(MOMENTS),1000) KVRECALL_SESSION_KILLS=200 KVRECALL_SESSION_DAMAGES=300 \
	  $(BIN)/python -m pytest -q -rP $(WORKERS) tests/test_refused_memory.py tests/backends/test_random_interrupts.py \
	  tests/backends/test_session_damage.py $(ARGS)

lint: $(STAMP) docs ## Check style, formatting, types and the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: $(STAMP) ## Build the documentation into build/site; a broken link or example name is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

wheel: $(STAMP) ## Build sdist and wheel into dist/, check them, and run the demo of the installed wheel
	$(BIN)/python scripts/check_wheel.py

format: $(STAMP) ## Fix style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-cpu: $(STAMP) ## Run the benchmarks that need no GPU
	$(BIN)/python -m benchmarks.cpu_layer $(ARGS)

bench-gpu: $(STAMP) ## Run the benchmarks of kernels, layers and a whole model on a CUDA GPU
	@set -e; for name in layer methods ops decode prefill; do \
	  $(BIN)/python -m benchmarks $$name --out build/bench/gpu_$$name.csv; \
	  $(BIN)/python -m scripts.bench_rows --add build/bench/gpu_$$name.csv benchmarks/results/gpu_$$name.csv; \
	done

# Compiling kernels takes most of the time, so there are more workers than the GPU needs; what one has compiled, all find in
# TRITON_CACHE_DIR. Each takes the next test when it has ended one.
GPU_WORKERS ?= -n 10 --maxschedchunk 1

test-gpu: $(STAMP) ## Run only the tests that need a CUDA GPU (GPU_WORKERS= for one process)
	$(PARALLEL) $(BIN)/python -m pytest -q -m gpu $(GPU_WORKERS) $(ARGS)

test-gpu2: $(STAMP) ## Run only the tests that need two CUDA GPUs: tensor parallelism
	$(PARALLEL) $(BIN)/python -m pytest -q -m gpu2 -n 4 --maxschedchunk 1 $(ARGS)

VLLM ?= 0.32.0
VLLM_ENV := .venv-vllm-$(VLLM)

test-vllm: $(VLLM_ENV)/.installed ## Run the tests of vLLM's backend, in an environment with vLLM's CPU build (VLLM=0.32.0)
	$(PARALLEL) $(VLLM_ENV)/bin/python -m pytest -q tests/backends/vllm tests/engine/test_serving.py $(ARGS)

# Those that start one engine each for what another one shows, too, are left out.
VLLM_CI := not several_answers and not small_budgets and not two_ranks and not two-ranks and not scarce and not host_memory and not v2_preempts and not beside_the_pages and not was_planned and not (warms_up and device) and not (covers and (exact or products))

test-vllm-ci: $(VLLM_ENV)/.installed ## Run those of them that a change must pass, and tell their time
	time $(PARALLEL) $(VLLM_ENV)/bin/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile --durations=8 tests/backends/vllm \
	  -k "$(VLLM_CI)" $(ARGS)

$(VLLM_ENV)/.installed: pyproject.toml scripts/install_vllm.sh
	@PYTHON="$(PYTHON)" bash scripts/install_vllm.sh $(VLLM_ENV) $(VLLM)
	@touch $@

test-zoo: $(STAMP) ## Compare every family of transformers with plain generate; write docs/design/families.md (minutes)
	@rm -rf build/zoo
	-$(PARALLEL) $(BIN)/python -m pytest -q $(WORKERS) -m zoo --tb=line tests/zoo/test_every_family.py $(ARGS)
	$(BIN)/python -m scripts.families_page

test-vllm-zoo: $(VLLM_ENV)/.installed ## Compare every causal family that vLLM has with its own backends; write docs/design/families.md (an hour)
	@rm -rf build/zoo-vllm
	-$(PARALLEL) $(VLLM_ENV)/bin/python -m pytest -q -n auto --maxprocesses 4 -m zoo --tb=line tests/zoo/vllm/test_every_family.py $(ARGS)
	$(VLLM_ENV)/bin/python -m scripts.families_page --vllm

clean: ## Remove caches and build output (keeps .venv and model weights)
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks htmlcov .coverage
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
