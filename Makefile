# Everything is installed into .venv; a stamp file there says what is done, so a second run starts
# at once. Variables: see `make help`.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON = python3
VENV := .venv
BIN := $(VENV)/bin

# cuda where an NVIDIA driver answers, else cpu.
DEVICE := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
ifeq ($(filter $(DEVICE),cpu cuda),)
$(error expected DEVICE=cpu or DEVICE=cuda, got DEVICE=$(DEVICE))
endif

# `=`, not `?=`: some shells export HOST and PORT for their own ends.
MODEL =
FAMILY =
HOST =
PORT =
DTYPE =
ARGS =
JOBS = $(shell nproc 2>/dev/null || echo 2)

RUNTIME := $(VENV)/.installed-$(DEVICE)
DEV := $(VENV)/.installed-dev

# The version pinned in pyproject.toml, from PyTorch's own index if pip does not find it elsewhere.
TORCH_CPU := torch==$(shell sed -n 's/^cpu = \["torch==\([0-9.]*\)".*/\1/p' pyproject.toml)+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: help setup serve test test-gpu test-fast bench lint lint-kernels clean distclean in-place

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## /\1|/p' $(MAKEFILE_LIST) | \
	    while IFS='|' read -r target what; do printf '  make %-13s %s\n' "$$target" "$$what"; done
	@echo
	@echo "  Variables of serve: MODEL=name-or-path (default: a demo model), FAMILY=v2-lite|v3|v3.2|v3-default-rope,"
	@echo "  HOST, PORT, DTYPE, ARGS='more options of mla-backend serve'. Of tests: JOBS=processes, 8 at most."
	@echo "  For all: PYTHON, DEVICE=cpu|cuda."

setup: $(DEV) ## install everything, then check the installation
	@$(BIN)/mla-backend doctor

serve: $(RUNTIME) ## serve a model on http://127.0.0.1:8000 (OpenAI-compatible)
	@exec $(BIN)/mla-backend serve $(if $(MODEL),"$(MODEL)",$(if $(FAMILY),--mla-demo "$(FAMILY)")) \
	    $(if $(HOST),--host "$(HOST)") $(if $(PORT),--port "$(PORT)") \
	    $(if $(DTYPE),--dtype "$(DTYPE)") $(ARGS)

# One thread a process: those of one wait for each other at every operation, and do so for long where
# another process has a core. Beside another, an engine of 30 s took over 110 s on two cores.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=10 -n $(JOBS) --maxprocesses 8 \
    --dist loadgroup

test: lint ## lint, then all tests, in JOBS processes
	$(PYTEST)

test-gpu: $(DEV) ## the tests that need a GPU: kernels, and engines beside vLLM's own MLA backends
	$(BIN)/python -m pytest tests/gpu tests/kernels -m gpu $(ARGS)

test-fast: $(DEV) ## the tests that start no engine
	$(PYTEST) -m "not engine"

bench: $(DEV) ## our backend against stock vLLM, serving the demo model on this machine
	$(BIN)/python benchmarks/serve_cpu.py $(ARGS)

lint: $(DEV) ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

lint-kernels: $(DEV) ## compile every GPU kernel for every architecture; needs no GPU
	$(BIN)/python -m mla_kernels.offline $(ARGS)

clean: ## remove build outputs and caches
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf $(VENV)

# Copied or moved with its folder, a .venv runs the code of the old place, or none.
in-place:
	@[[ -e $(BIN)/activate ]] || exit 0; \
	home=$$(set +eu; VIRTUAL_ENV=; . $(BIN)/activate; echo "$$VIRTUAL_ENV"); \
	[[ -z $$home || $$home -ef $(VENV) ]] || \
	    { echo "$(VENV) was set up as $$home; here run: make distclean, then again" >&2; exit 1; }

$(RUNTIME): pyproject.toml | $(BIN)/python in-place
$(DEV): $(RUNTIME)

# One make at a time sets up; another waits and finds it done, and deletes nothing if it is interrupted
# meanwhile. flock says 1 for a lock that is held; where there is none to be had (without flock, on NFS or
# Lustre) nobody waits.
ifndef SETTING_UP
.PRECIOUS: $(BIN)/python $(RUNTIME) $(DEV)
$(BIN)/python $(RUNTIME) $(DEV):
	@exec 9<Makefile; flock -n 9 2>/dev/null || [[ $$? != 1 ]] || { \
	    echo "another make sets up $(VENV); waiting for it" >&2; flock 9; }; \
	exec $(MAKE) --no-print-directory SETTING_UP=1 $@
else
$(BIN)/python:
	@if [[ -e $(RUNTIME) ]]; then \
	    echo "the Python that $(VENV) was set up with is gone; run: make distclean, then again" >&2; exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	    { echo "Python 3.11 or newer is needed and '$(PYTHON)' is not: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "'$(PYTHON)' has no venv module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-cpu:
	@$(call refuse_other,cuda)
	@$(refuse_old)
	@$(ensure_pip)
	@$(BIN)/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || \
	    { echo "vLLM on a CPU needs libnuma: apt install libnuma1 (or dnf install numactl-libs)" >&2; exit 1; }
	@echo "Installing $(TORCH_CPU) and vLLM into $(VENV) (once; about 3 GB on disk)"
	$(BIN)/pip install "$(TORCH_CPU)" 2>/dev/null || \
	    $(BIN)/pip install "$(TORCH_CPU)" --extra-index-url $(TORCH_CPU_INDEX)
	$(BIN)/pip install -e ".[cpu]"
	@# Their PyPI builds do not match torch's CPU build and break imports; nothing here needs them.
	$(BIN)/pip uninstall -y torchvision torchaudio torchcodec
	@touch $@

$(VENV)/.installed-cuda:
	@$(call refuse_other,cpu)
	@$(refuse_old)
	@$(ensure_pip)
	$(BIN)/pip install -e ".[cuda]"
	@touch $@

$(DEV):
	$(BIN)/pip install -e ".[dev$(if $(filter cpu,$(DEVICE)),$(comma)interpreter)]"
	@touch $@
endif

comma := ,
define refuse_other
if [[ -e $(VENV)/.installed-$(1) ]]; then \
    echo "$(VENV) was set up for $(1); for $(DEVICE) run: make distclean, then again" >&2; exit 1; fi
endef
# Of a .venv that was made by hand.
refuse_old = $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
    { echo "Python 3.11 or newer is needed and that of $(VENV) is not; run: make distclean, then again" >&2; exit 1; }
# A set-up that was killed at its start leaves a Python without pip.
ensure_pip = [[ -e $(BIN)/pip ]] || $(BIN)/python -m ensurepip --default-pip
