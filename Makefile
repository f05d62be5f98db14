# SPDX-License-Identifier: Apache-2.0
# Every target sets up what it needs. TORCH=torch==2.14.1 make venv takes another torch (the default is a
# CPU build where a CPU wheel of it is at hand); FSDP_KERNELS_CUDA is auto, require or skip, see setup.py.

VENV ?= .venv
TORCH ?= torch==2.13.0
NCCL ?= nvidia-nccl-cu13==2.30.7
NPROC ?= 2
FSDP_KERNELS_CUDA ?= auto
PYTEST_ARGS ?= -n 2 --dist loadfile
TRAIN_ARGS ?=
GPU_CHECK_ARGS ?=
export FSDP_KERNELS_CUDA

# The first Python that the package supports.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
TOOLS := $(VENV)/.tools
BUILT := $(VENV)/.built-$(FSDP_KERNELS_CUDA)
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh')

.PHONY: venv train test lint bench gpu-check clean

venv: $(BUILT)

# torch first: whatever is installed later must not pull another one.
$(TOOLS): Makefile
	@test -n "$(PYTHON)" || { echo "make venv: expected Python 3.11 to 3.13 as python3, found none. Set PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q "setuptools>=77" "pybind11>=2.13" ninja
	touch $@

# The NCCL headers come with a CUDA build of torch; beside a CPU build they are installed if CUDA parts are wanted.
$(BUILT): $(TOOLS) pyproject.toml setup.py $(SOURCES)
	@if test $(FSDP_KERNELS_CUDA) = require || { test $(FSDP_KERNELS_CUDA) = auto && command -v nvcc >/dev/null; }; then \
		ls $(VENV)/lib/python*/site-packages/nvidia/nccl/include/nccl.h >/dev/null 2>&1 \
		|| $(BIN)/python -m pip install -q "$(NCCL)"; fi
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[test,train,plan,lint]"
	@$(BIN)/fsdp-kernels env
	@rm -f $(VENV)/.built-*
	@touch $@

# One thread for each process unless told otherwise: two processes share two cores.
train: $(BUILT)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node $(NPROC) examples/train_lm.py $(TRAIN_ARGS)

test: $(BUILT)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(BUILT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(SOURCES) $(wildcard tests/*.cpp tests/*/*.cpp tests/*/*.h)

# In a short form; the rows that the README quotes come from the benches' own defaults.
bench: $(BUILT)
	$(BIN)/fsdp-kernels bench adam --rounds 7
	$(BIN)/fsdp-kernels bench reduce_adam --rounds 7
	$(BIN)/fsdp-kernels bench pack --rounds 7
	$(BIN)/fsdp-kernels bench norm --rounds 7
	$(BIN)/fsdp-kernels bench collectives --rounds 7 --sizes 65536 16777216
	$(BIN)/fsdp-kernels bench step --rounds 11
	$(BIN)/fsdp-kernels bench step --rounds 11 --dtype bf16
	$(BIN)/fsdp-kernels bench host --rounds 15
	$(BIN)/fsdp-kernels bench memory

# On a CUDA host, with the Python and torch that are there; offline, nothing is installed.
gpu-check:
	$${GPU_PYTHON:-python3} bench/gpu_check.py $(GPU_CHECK_ARGS)

clean:
	rm -rf build dist *.egg-info fsdp_kernels/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis $(VENV)/.built-*
