# make install   .venv with torch and the tools, zero_ext built and installed into it (editable)
# make train     trains a byte-level GPT on two ranks        STAGE=1|2|3  ARGS="--size small ..."
# make test      quick tests: one rank, 2, and what depends on their number on 3 and 4   make test-all: all
# make cuda-build     builds for torch's CUDA variant, GPU or not   CUDA_ARCHS="8.0 9.0 10.0"
# make cuda-test      runs the one-rank tests on that build, on the CPU and on the emulated device
# make cuda-kernels   nvcc compiles each CUDA kernel alone, and the host emulates them
# make bench-deepspeed   installs DeepSpeed, whose kernels its first run compiles, and measures beside it
# make bench  lint  format  clean  dist-check   (a wheel from the sdist)   cuda-dist-check   (a CUDA wheel)

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
STAGE ?= 2
ARGS ?=

CUDA_TORCH ?= torch==2.11.0
CUDA_ARCHS ?= 8.0 9.0 10.0
CUDA_BUILD := build/cuda

VENV := .venv
CUDA_VENV := .venv-cuda
CUDA_PY := $(CUDA_VENV)/bin/python
PY := $(VENV)/bin/python
TORCHRUN := $(PY) -m torch.distributed.run --standalone
# Two compilers at once: bindings.cpp alone takes 1.5 GB. torch's build uses ccache where it is on PATH.
export MAX_JOBS ?= 2
# One thread per rank: ranks share the processors.
train test test-all bench bench-deepspeed: export OMP_NUM_THREADS := 1

NATIVE := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu')
EMULATION := $(shell find tests/support -name '*.h' -o -name '*.cpp')
# Started by python, the others by torchrun.
PLAIN_BENCHES := $(wildcard benchmarks/bench_kernels.py benchmarks/bench_hooks.py benchmarks/bench_memory.py)
GPU_BENCHES := benchmarks/bench_cuda.py benchmarks/bench_cuda_step.py
DEEPSPEED_BENCHES := benchmarks/bench_deepspeed.py
BENCHES := $(filter-out $(PLAIN_BENCHES) $(GPU_BENCHES) $(DEEPSPEED_BENCHES),$(wildcard benchmarks/bench_*.py))

.PHONY: install train test test-all cuda-kernels cuda-build cuda-test bench bench-deepspeed lint format dist-check \
  cuda-dist-check clean

install: $(VENV)/.installed

$(VENV)/.torch: Makefile
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet "setuptools>=77" ninja "$(TORCH)"
	touch $@

$(VENV)/.installed: $(VENV)/.torch setup.py pyproject.toml $(NATIVE)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pip install --quiet --no-build-isolation -e ".[dev]"
	touch $@

train: install
	$(TORCHRUN) --nproc-per-node 2 examples/train_lm.py --stage $(STAGE) $(ARGS)

# Test files by name, in whichever room they are.
named = $(foreach name,$(1),$(wildcard tests/*/test_$(name).py))
ALL_TESTS := $(wildcard tests/*/test_*.py)

# What depends on the number of ranks: sums in rank order, padding, straddling, passes. The rest runs on
# three and four ranks in test-all.
THREE_RANKS_TESTS := $(call named,checkpoint shared_host_transport equivalence order comm_ops memory_stage3 norm recovery scenarios_c stage3)
FOUR_RANKS_TESTS := $(call named,equivalence comm_ops hybrid norm stage3)
# As ranks on different hosts: their messages go through the process group.
ONLY_GROUP := ZERO_EXT_CROSS_MEMORY=0
# Hybrid sharding, wherever tests shard over a mesh, but for those whose formulas have one dimension.
REPLICAS := ZERO_EXT_TEST_SHARDS=2
REPLICAS_TESTS := $(filter-out $(call named,memory memory_stage3 meta shard_tensor),$(ALL_TESTS))

# On the device that tests/support/lagged_device makes, whose work is late and which refuses what CUDA refuses.
# One rank: whatever runs on a device at all. Several: with messages through host memory, and with those of
# its own backend.
LAGGED_RANKS_TESTS := $(call named,devices inner_backwards out_of_memory recovery scenarios_c)
LAGGED_TESTS := $(filter-out $(call named,build comm_ops config cuda_kernels cuda_sources docs example gpu_suite harness integrations kernels \
  lagged_device layout lightning ops pipeline residency schedules torch_modules typing),$(ALL_TESTS))
LAGGED := ZERO_EXT_TEST_DEVICE=lagged
LCCL := $(LAGGED) ZERO_EXT_TEST_BACKENDS=cpu:gloo,lagged:lccl
# One-rank tests two at a time. Those of several ranks have the processors for their ranks.
ONE_RANK_PYTEST := $(PY) -m pytest -n 2 --dist worksteal

test: install
	$(ONE_RANK_PYTEST) tests -m "not dist and not slow"
	$(LAGGED) $(ONE_RANK_PYTEST) $(LAGGED_TESTS) -m "not dist and not slow"
	$(call test_ranks,dist and not slow,2,tests)
	$(call test_ranks,dist and not slow,3,$(THREE_RANKS_TESTS))
	$(call test_ranks,dist and not slow,4,$(FOUR_RANKS_TESTS),$(ONLY_GROUP))
	$(call test_ranks,dist and not slow,2,$(filter-out %/test_inner_backwards.py,$(LAGGED_RANKS_TESTS)),$(LAGGED))
	$(call test_ranks,dist and not slow,2,$(filter-out %/test_out_of_memory.py,$(LAGGED_RANKS_TESTS)),$(LCCL))
	$(call test_ranks,dist and not slow,4,$(call named,hybrid),$(LCCL))

test-all: install
	$(ONE_RANK_PYTEST) tests -m "not dist"
	$(LAGGED) $(ONE_RANK_PYTEST) $(LAGGED_TESTS) -m "not dist"
	$(call test_ranks,dist,2 3 4,tests)
	$(call test_ranks,dist,2 3,tests,$(ONLY_GROUP))
	$(call test_ranks,dist,2 3,$(LAGGED_TESTS),$(LAGGED))
	$(call test_ranks,dist,2 3,$(LAGGED_RANKS_TESTS),$(LCCL))
	$(call test_ranks,dist and not slow,4,$(REPLICAS_TESTS),$(REPLICAS))
	$(call test_ranks,dist,4,$(call named,hybrid),$(LAGGED))

cuda-kernels: install
	$(PY) -m pytest $(call named,cuda_sources)

# No find-links: a folder of CPU wheels would be preferred to the CUDA variant.
$(CUDA_VENV)/.torch: Makefile
	test -x $(CUDA_PY) || $(PYTHON) -m venv $(CUDA_VENV)
	PIP_FIND_LINKS= $(CUDA_PY) -m pip install --quiet "setuptools>=77" ninja numpy "$(CUDA_TORCH)"
	touch $@

# nvcc knows where its toolkit is even where it is started through a script in another place.
FOR_CUDA = ZERO_EXT_CUDA=1 TORCH_CUDA_ARCH_LIST="$(CUDA_ARCHS)" CUDA_HOME="$${CUDA_HOME:-$$(dirname \
  "$$(nvcc --dryrun -E -x cu /dev/null 2>&1 | sed -n 's/^\#$$ _HERE_=//p')")}"

# Not in place: the extension for the CPU's torch stays what it is.
cuda-build: $(CUDA_VENV)/.torch
	$(FOR_CUDA) PATH="$(CURDIR)/$(CUDA_VENV)/bin:$$PATH" \
	  $(CUDA_PY) setup.py --quiet build --build-lib $(CUDA_BUILD)/lib --build-temp $(CUDA_BUILD)/temp
	PYTHONPATH="$(CURDIR)/$(CUDA_BUILD)/lib" $(CUDA_PY) scripts/check_cuda_build.py $(CUDA_ARCHS)

# pytest as a program: `python -m` would put this folder, and with it the other build, first.
cuda-test: cuda-build
	$(CUDA_PY) -m pip install --quiet pytest pytest-timeout pytest-xdist hypothesis expecttest safetensors matplotlib tqdm
	PYTHONPATH="$(CURDIR)/$(CUDA_BUILD)/lib" $(CUDA_VENV)/bin/pytest -n 2 --dist worksteal tests -m "not dist and not slow"
	PYTHONPATH="$(CURDIR)/$(CUDA_BUILD)/lib" $(LAGGED) $(CUDA_VENV)/bin/pytest -n 2 --dist worksteal $(LAGGED_TESTS) -m "not dist and not slow"

# Rank 0 writes to the terminal, the others to build/test-logs, shown when something failed.
define test_ranks
	@for ranks in $(2); do \
	  echo "== $$ranks ranks $(4)"; \
	  logs=build/test-logs/$$ranks; rm -rf $$logs; mkdir -p $$logs; \
	  $(4) $(TORCHRUN) --nproc-per-node $$ranks --log-dir $$logs --redirects 1:3,2:3,3:3 \
	    -m pytest $(3) -p no:cacheprovider -m "$(1)" || { \
	      find $$logs -name '*.log' -size +0 -exec tail -v -n 80 {} +; exit 1; }; \
	done
endef

bench: install
	set -e; for bench in $(PLAIN_BENCHES); do echo "== $$bench"; $(PY) $$bench; done
	set -e; for bench in $(BENCHES); do echo "== $$bench"; $(TORCHRUN) --nproc-per-node 2 $$bench; done

# Without isolation, and with torch there, pip leaves torch as it is.
bench-deepspeed: install
	$(PY) -m pip install --quiet --no-build-isolation "deepspeed==0.19.8"
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(TORCHRUN) --nproc-per-node 2 $(DEEPSPEED_BENCHES)

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(NATIVE) $(EMULATION)

format: install
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(NATIVE) $(EMULATION)

# The sdist must hold all that a wheel needs, and the wheel all that an import needs. The directories
# are always the same, so that ccache recognises the sources.
DIST := build/dist
# $(1): the environment that the wheel is for, $(2): what is set for its build
define dist_check
	rm -rf $(DIST)
	mkdir -p $(DIST)/source $(DIST)/installed
	$(PY) -m build --sdist --no-isolation --outdir $(DIST) . > $(DIST)/sdist.log 2>&1 || { cat $(DIST)/sdist.log; exit 1; }
	tar -xzf $(DIST)/*.tar.gz -C $(DIST)/source --strip-components 1
	$(2) PATH="$(CURDIR)/$(1)/bin:$$PATH" $(1)/bin/python -m pip wheel --quiet --no-build-isolation --no-deps \
	  --wheel-dir $(DIST) ./$(DIST)/source
	$(1)/bin/python -m pip install --quiet --no-deps --target $(DIST)/installed $(DIST)/*.whl
	cd $(DIST)/installed && "$(CURDIR)/$(1)/bin/python" -m zero_ext.info | tee ../info.txt
	grep -q "$(CURDIR)/$(DIST)/installed/zero_ext/_C" $(DIST)/info.txt
endef

dist-check: install
	$(call dist_check,$(VENV))

# What CI builds for CUDA: cuda-build and dist-check in one.
cuda-dist-check: install $(CUDA_VENV)/.torch
	$(call dist_check,$(CUDA_VENV),$(FOR_CUDA))
	PYTHONPATH="$(CURDIR)/$(DIST)/installed" $(CUDA_PY) scripts/check_cuda_build.py $(CUDA_ARCHS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis zero_ext/*.so zero_ext/_build_info.py $(VENV)/.installed
	find zero_ext tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +
