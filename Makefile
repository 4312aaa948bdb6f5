# make install   .venv with torch and the tools, zero_ext built and installed into it (editable)
# make train     trains a byte-level GPT on two ranks        STAGE=1|2|3  OPTIMIZER=muon  ARGS="--size small ..."
# make test      quick tests: one rank, 2, and what depends on their number on 3 and 4   make test-all: all
# make test-torch-2.15.0   quick tests beside another torch, in a copy in build/ with an environment of its own
# make test-changed   those of the rooms changed since main, and of all rooms above   BASE=commit
# make mutations   1,000 mutated programs for each stage, against plain PyTorch        PROGRAMS=5000
# make sanitize  quick tests on one and on two ranks, with the address and undefined behaviour sanitizers
# make tsan      quick tests of threads and of messages, with the thread sanitizer
# make cuda-build     builds for torch's CUDA variant, GPU or not   CUDA_ARCHS="8.0 9.0 10.0"
# make cuda-test      runs the one-rank tests on that build, on the CPU and on the emulated device
# make cuda-kernels   nvcc compiles each CUDA kernel alone, and the host emulates them
# make test-deepspeed    installs DeepSpeed into a venv of its own, and trains beside it on the CPU
# make test-packages     installs published optimizers and trainers into a venv of its own, and runs them
# make bench-deepspeed   installs DeepSpeed, whose kernels its first run compiles, and measures beside it
# make profile   where time and memory of a step go: a trace of each rank and a page   PROFILE="--stage 3 ..."
# make tidy      clang-tidy on the C++ sources, with the checks of .clang-tidy
# make docs      the site of the documentation, into build/site; warnings are errors
# make wheel     one wheel for several versions of torch, into dist   WHEEL_FOR="2.13.0-cpu 2.11.0-cuda ..."
# make wheel-check   installs it without a compiler beside each of these versions, and trains
# make bench  lint  format  clean  dist-check   (README's install block)   cuda-dist-check   (for CUDA)

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
STAGE ?= 2
OPTIMIZER ?= adamw
ARGS ?=

CUDA_TORCH ?= torch==2.11.0
CUDA_ARCHS ?= 8.0 9.0 10.0
CUDA_BUILD := build/cuda

VENV := .venv
CUDA_VENV := .venv-cuda
CUDA_PY := $(CUDA_VENV)/bin/python
PY := $(VENV)/bin/python
TORCHRUN := $(PY) -m torch.distributed.run --standalone
# Two compilers at once: the room python/ alone takes 1.7 GB. torch's build uses ccache where it is on PATH.
export MAX_JOBS ?= 2
# setup.py: warnings are errors in the builds that are made here.
export ZERO_EXT_WERROR ?= 1
# One thread per rank: ranks share the processors.
train bench bench-deepspeed profile mutations test-% all-% sanitize tsan: export OMP_NUM_THREADS := 1

NATIVE := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu')
EMULATION := $(shell find tests/support -name '*.h' -o -name '*.cpp')
# Started by python, the others by torchrun.
PLAIN_BENCHES := $(wildcard benchmarks/bench_kernels.py benchmarks/bench_hooks.py benchmarks/bench_memory.py benchmarks/bench_checkpoint.py)
GPU_BENCHES := benchmarks/bench_cuda.py benchmarks/bench_cuda_step.py
BENCHES := $(filter-out $(PLAIN_BENCHES) $(GPU_BENCHES) benchmarks/bench_deepspeed.py,$(wildcard benchmarks/bench_*.py))

# What `make test` and `make test-all` consist of, the longest first. The one-rank tests compile the
# emulated device: lagged ones beside them would wait for it.
SEGMENTS := $(addprefix test-,2-ranks one-rank lagged-one-rank 3-ranks hosts-4-ranks lagged-2-ranks lccl-2-ranks direct-3-ranks lccl-4-ranks)
ALL_SEGMENTS := $(addprefix all-,one-rank lagged-one-rank 2-ranks 3-ranks 4-ranks group-2-ranks group-3-ranks \
  lagged-2-ranks lagged-3-ranks lccl-2-ranks lccl-3-ranks direct-2-ranks direct-3-ranks hosts-4-ranks replicas-4-ranks lagged-4-ranks)

.PHONY: install train test test-all test-changed $(SEGMENTS) $(ALL_SEGMENTS) mutations sanitize tsan cuda-kernels cuda-build cuda-test \
  bench bench-deepspeed test-deepspeed test-packages profile docs lint tidy format dist-check cuda-dist-check wheel wheel-check \
  clean

install: $(VENV)/.installed

# $(1): the requirement of torch, $(2): what is set for pip
define with_torch
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(2) $(@D)/bin/python -m pip install --quiet "setuptools>=77" ninja numpy "$(1)"
	touch $@
endef
$(VENV)/.torch: Makefile
	$(call with_torch,$(TORCH))

$(VENV)/.installed: $(VENV)/.torch setup.py pyproject.toml $(NATIVE)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pip install --quiet --no-build-isolation -e ".[dev]"
	touch $@

train: install
	$(TORCHRUN) --nproc-per-node 2 examples/train_lm.py --stage $(STAGE) --optimizer $(OPTIMIZER) $(ARGS)

# Which tests a segment has is a table in tests/support/segments.py. Each can be made alone: make test-3-ranks
test: $(SEGMENTS)
test-all: $(ALL_SEGMENTS) test-torch-2.15.0
$(SEGMENTS) $(ALL_SEGMENTS): install
	$(PY) tests/support/segments.py $@

# In a copy of what git tracks: the extension in this folder stays the one for this folder's torch.
test-torch-%:
	test -e build/torch-$* || git worktree add --force --detach build/torch-$*
	commit=$$(git stash create) && git -C build/torch-$* checkout --quiet --detach $${commit:-$$(git rev-parse HEAD)}
	ZERO_EXT_CUDA=0 $(MAKE) -C build/torch-$* test TORCH=torch==$*

# What changed since BASE: by default the last commit that this branch shares with main.
test-changed: install
	$(PY) tests/support/segments.py $@ $$($(PY) scripts/changed_tests.py $(BASE))

# 4,000 programs take ten minutes.
PROGRAMS ?= 1000
mutations: export PROGRAMS := $(PROGRAMS)
mutations: install
	$(PY) tests/support/segments.py $@

cuda-kernels: install
	$(PY) -m pytest tests/kernels/test_cuda_sources.py

# No find-links: a folder of CPU wheels would be preferred to the CUDA variant.
$(CUDA_VENV)/.torch: Makefile
	$(call with_torch,$(CUDA_TORCH),PIP_FIND_LINKS=)

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
	$(CUDA_PY) -m pip install --quiet pytest pytest-timeout pytest-xdist hypothesis expecttest safetensors cloudpickle matplotlib tqdm
	PYTHONPATH="$(CURDIR)/$(CUDA_BUILD)/lib" $(CUDA_VENV)/bin/pytest -n 2 --dist worksteal tests -m "not dist and not slow"
	PYTHONPATH="$(CURDIR)/$(CUDA_BUILD)/lib" ZERO_EXT_TEST_DEVICE=lagged $(CUDA_VENV)/bin/pytest -n 2 --dist worksteal \
	  $$($(PY) tests/support/segments.py --tests test-lagged-one-rank) -m "not dist and not slow"

sanitize tsan: install
	scripts/sanitize.sh $@ $(PY)

bench: install
	set -e; for bench in $(PLAIN_BENCHES); do echo "== $$bench"; $(PY) $$bench; done
	set -e; for bench in $(BENCHES); do echo "== $$bench"; $(TORCHRUN) --nproc-per-node 2 $$bench; done

# A Chrome trace of each rank and one page, see benchmarks/README.md. PROFILE: arguments of the script.
profile: install
	$(TORCHRUN) --nproc-per-node 2 -m zero_ext.profile --out build/profile benchmarks/profile_step.py $(PROFILE)

# Without isolation, and with torch there, pip leaves torch as it is.
bench-deepspeed: install
	$(PY) -m pip install --quiet --no-build-isolation -r tests/requirements/deepspeed-alone.txt
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(TORCHRUN) --nproc-per-node 2 benchmarks/bench_deepspeed.py

# Torch, zero_ext and the tools are those of .venv. NAME.txt brings no torch. What NAME-alone.txt lists would.
.venv-%/.installed: tests/requirements/%.txt tests/requirements/%-alone.txt $(VENV)/.installed
	$(PYTHON) -m venv $(@D)
	echo "import site; site.addsitedir('$(CURDIR)/$(VENV)/lib/$$(ls $(VENV)/lib)/site-packages')" \
	  > $(@D)/lib/$$(ls $(@D)/lib)/site-packages/base.pth
	$(@D)/bin/python -m pip install --quiet "setuptools>=77" -r $<
	DS_BUILD_OPS=0 $(@D)/bin/python -m pip install --quiet --no-deps --no-build-isolation -r $(word 2,$^)
	touch $@

# A test would not wait for DeepSpeed's compiler.
.venv-deepspeed/.compiled: .venv-deepspeed/.installed
	PATH="$(CURDIR)/$(@D)/bin:$$PATH" DS_ACCELERATOR=cpu $(@D)/bin/python -c \
	  "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
	touch $@

test-deepspeed: .venv-deepspeed/.compiled
	PATH="$(CURDIR)/$(<D)/bin:$$PATH" DS_ACCELERATOR=cpu $(<D)/bin/python -m torch.distributed.run --standalone \
	  --nproc-per-node 2 -m pytest tests/deepspeed/test_beside_deepspeed.py -m dist -p no:cacheprovider -rs

test-packages: .venv-packages/.installed
	$(<D)/bin/python -m pytest tests/optim/test_packages.py tests/data/test_stateful_loader.py tests/elastic/test_ray.py tests/integrations/test_rl_weights.py tests/project/test_notebook.py -m "not dist" -p no:cacheprovider -rs
	$(<D)/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 \
	  -m pytest tests/optim/test_packages.py tests/integrations/test_trainers.py tests/integrations/test_torchao.py tests/integrations/test_verl.py -m dist -p no:cacheprovider -rs

lint: install
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	$(PY) tests/support/check_types.py
	$(VENV)/bin/clang-format --dry-run --Werror $(NATIVE) $(EMULATION)

docs: install
	$(PY) -m sphinx -q -W --keep-going -c docs -d build/docs . build/site

TIDY_INCLUDES = $$($(PY) -c 'import sysconfig; from torch.utils import cpp_extension as c; \
  print(*("-isystem" + p for p in [*c.include_paths("cpu"), sysconfig.get_path("include")]))')
tidy: install
	includes="$(TIDY_INCLUDES)"; printf '%s\n' $(filter %.cpp,$(NATIVE)) | xargs -P $(MAX_JOBS) -I {} $(VENV)/bin/clang-tidy --quiet {} -- \
	  -std=c++20 -DTORCH_EXTENSION_NAME=_C -DTORCH_API_INCLUDE_EXTENSION_H -Icsrc $$includes

format: install
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(NATIVE) $(EMULATION)

# The sdist must hold all that an installation needs, and what is installed all that an import needs: README's
# install block runs in the unpacked sdist. The folders are always the same, so that ccache recognises the sources.
DIST := build/dist
# $(1): the environment that has torch, $(2): what is set for the build
define dist_check
	rm -rf $(DIST)
	mkdir -p $(DIST)/source
	$(PY) -m build --sdist --no-isolation --outdir $(DIST) . > $(DIST)/sdist.log 2>&1 || { cat $(DIST)/sdist.log; exit 1; }
	tar -xzf $(DIST)/*.tar.gz -C $(DIST)/source --strip-components 1
	$(2) $(PY) scripts/check_install.py $(DIST)/source $(1)/bin/python
endef

dist-check: install
	$(call dist_check,$(VENV))

# What CI builds for CUDA: cuda-build and dist-check in one. Nothing runs, so the host's code may be slow.
# g++ sees what is not there with -O1: the warnings of the host's code are those of the CPU's build.
cuda-dist-check: install $(CUDA_VENV)/.torch
	$(call dist_check,$(CUDA_VENV),CFLAGS="-O1 -w" $(FOR_CUDA))
	$(DIST)/environment/bin/python scripts/check_cuda_build.py $(CUDA_ARCHS)

# One wheel that holds an extension for each torch named, as VERSION-cpu or VERSION-cuda. One without CUDA
# kernels serves any build of that torch. Each torch has an environment of its own, and each build a folder.
WHEEL_FOR ?= 2.11.0-cpu 2.11.0-cuda 2.13.0-cpu 2.15.0-cpu
WHEELS := build/wheel
wheel_torches = $(sort $(patsubst %-cpu,%,$(patsubst %-cuda,%,$(WHEEL_FOR))))
.PRECIOUS: $(WHEELS)/torch-%/.torch
$(WHEELS)/torch-%/.torch:
	$(call with_torch,torch==$*)

# $(1): a version of torch, $(2): cpu or cuda, $(3): what is set for its build
define build_wheel
	rm -rf $(WHEELS)/$(1)-$(2)
	mkdir -p $(WHEELS)/$(1)-$(2)
	$(3) TORCH_NO_COMPILER_WRAPPER=1 PATH="$(CURDIR)/$(WHEELS)/torch-$(1)/bin:$$PATH" \
	  $(WHEELS)/torch-$(1)/bin/python setup.py --quiet \
	  egg_info --egg-base $(WHEELS)/$(1)-$(2) build --build-base $(WHEELS)/$(1)-$(2) --build-temp $(WHEELS)/objects-$(2) \
	  bdist_wheel --skip-build --bdist-dir $(WHEELS)/$(1)-$(2)/files --dist-dir $(WHEELS)/$(1)-$(2)
endef
wheel-for-%-cpu: $(WHEELS)/torch-%/.torch
	$(call build_wheel,$*,cpu,ZERO_EXT_CUDA=0)
wheel-for-%-cuda: $(WHEELS)/torch-%/.torch
	$(call build_wheel,$*,cuda,$(FOR_CUDA))

wheel: $(addprefix wheel-for-,$(WHEEL_FOR))
	rm -f dist/*.whl
	$(PYTHON) scripts/merge_wheels.py dist $(foreach torch,$(WHEEL_FOR),$(WHEELS)/$(torch)/*.whl)

wheel-check: wheel
	$(PYTHON) scripts/check_wheel.py dist/zero_ext-*.whl $(foreach torch,$(wheel_torches),$(WHEELS)/torch-$(torch)/bin/python)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis zero_ext/*.so zero_ext/_build_info.py $(VENV)/.installed
	find zero_ext tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +
