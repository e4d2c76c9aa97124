# attn_zoo: every target does the set-up it needs. `make` alone shows this help.
# PYTHON: makes the virtual environment; the gpu targets use it as is.
# WORKERS: of test; three on two cores, because tests spend a third of the time waiting for processes of their own.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OUT ?= runs
TIME_LIMIT ?= 8.5
WORKERS ?= 3
JOBS ?= 8

.DEFAULT_GOAL := help
.PHONY: help setup bench bench-all peers test lint typecheck format docs docs-site gpu-test gpu-visit gpu gpu-peers gpu-energy gpu-decode gpu-accuracy clean

help:  ## show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: $(STAMP)  ## make .venv with everything (other targets do this by themselves)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attn_zoo needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (a minute or two) ..."
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[lra,xformers,ray,test,dev,docs]"
	@$(BIN)/python -m compileall -qq -j 0 -x /tests/ $(VENV)/lib || true  # on all cores, which pip does not
	@touch $(STAMP)

bench: $(STAMP)  ## run benchmarks/quick.toml and write tables, figures and report.html (a few minutes)
	$(BIN)/attn-zoo run benchmarks/quick.toml --out $(OUT)/quick
	$(BIN)/attn-zoo report $(OUT)/quick

bench-all: $(STAMP)  ## pytest-benchmark over every registered variant
	$(BIN)/python -m pytest benchmarks --benchmark-only -p no:xdist

PEERS := $(wildcard benchmarks/peers/*.py)
peers: $(STAMP)  ## ours beside other projects' implementations on the CPU (installs the extra `peers`)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[peers]"
	$(BIN)/attn-zoo run benchmarks/peers-cpu.toml --out $(OUT)/peers-cpu $(PEERS:%=--variant-file %)
	$(BIN)/attn-zoo report $(OUT)/peers-cpu

test: $(STAMP)  ## all tests that need no GPU
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not gpu"

lint: $(STAMP) typecheck  ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(STAMP)  ## mypy, strict, over package and tests
	$(BIN)/mypy

format: $(STAMP)  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)  ## update the generated tables of the documents and the index of results
	$(BIN)/python -m attn_zoo docs

docs-site: $(STAMP)  ## build the documentation into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open site/index.html"

# These run from the checkout with what PYTHON has installed, and with what lies on the caller's PYTHONPATH.
gpu-test gpu-visit gpu gpu-peers gpu-energy gpu-decode gpu-accuracy: export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

gpu-test:  ## tests marked gpu, with PYTHON as is (no virtual environment)
	$(PYTHON) -m pytest $$(grep -rl --include='test_*.py' 'mark[.]gpu' tests) -m gpu -q -n 12 --dist worksteal --benchmark-disable

gpu-visit:  ## a part of each gpu target, most valuable first; again until nothing is left; packs records into OUT, goes on from FROM
	$(PYTHON) benchmarks/gpu_visit.py --minutes $(TIME_LIMIT) --pack $(OUT) $(FROM:%=--from %)

gpu:  ## scaling on the GPU, TIME_LIMIT minutes a call, again to go on, results in OUT, with PYTHON as is
	$(PYTHON) -m attn_zoo run benchmarks/scaling-gpu.toml --device cuda --out $(OUT)/scaling-gpu --time-limit $(TIME_LIMIT)
	$(PYTHON) -m attn_zoo report $(OUT)/scaling-gpu

gpu-peers:  ## exact kernels and other projects' implementations on the GPU, likewise
	$(PYTHON) -m attn_zoo run benchmarks/peers-gpu.toml --device cuda --out $(OUT)/peers-gpu --time-limit $(TIME_LIMIT) $(PEERS:%=--variant-file %)
	$(PYTHON) -m attn_zoo report $(OUT)/peers-gpu

gpu-energy:  ## joules of three mechanisms on the GPU, if its counter can be read, likewise
	$(PYTHON) -m attn_zoo run benchmarks/energy-gpu.toml --device cuda --out $(OUT)/energy-gpu --time-limit $(TIME_LIMIT)
	$(PYTHON) -m attn_zoo report $(OUT)/energy-gpu

gpu-decode:  ## prefill and decoded tokens of every mechanism with a state on the GPU, likewise
	$(PYTHON) -m attn_zoo run benchmarks/decode-gpu.toml --device cuda --out $(OUT)/decode-gpu --time-limit $(TIME_LIMIT)
	$(PYTHON) -m attn_zoo report $(OUT)/decode-gpu

gpu-accuracy:  ## benchmarks/lra-small.toml on the GPU, JOBS trainings at once, likewise
	$(PYTHON) -m attn_zoo run benchmarks/lra-small.toml --device cuda --jobs $(JOBS) --out $(OUT)/lra-small --time-limit $(TIME_LIMIT)
	$(PYTHON) -m attn_zoo report $(OUT)/lra-small

clean:  ## remove the virtual environment and caches; results stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .benchmarks site .hypothesis build dist
