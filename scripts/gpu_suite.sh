#!/usr/bin/env bash
# Builds in place for this machine's GPU, tests, checks with compute-sanitizer and measures: in one
# call of under 9 minutes, without network, in this folder alone. Every step has a time limit; one that
# fails does not stop those after it, but the exit status is then 1.
#
#     scripts/gpu_suite.sh [STEP...]            PYTHON=python3.12
#
# Steps that are named run alone: those, say, for which an earlier call had no time, which may be the last
# two. Name `build` as well where the extension is not there yet.
#
# ZERO_EXT_NCCL=path names a libnccl of at least 2.30, for the step test_two_of_nccl: it takes two ranks on
# one GPU, which older ones reject.
#
# Writes benchmarks/results/<gpu>_<date>_<commit>.md and .json after every step; where $OUT is set, to
# there as well, with all that the steps said. A call that is killed leaves what it finished.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Without ninja, which may lie beside the interpreter alone, files are compiled one by one.
PATH="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH"
LOGS=build/gpu_suite
RESULTS="$LOGS/results"
rm -rf "$LOGS"
mkdir -p "$RESULTS"
only=("$@")

is_wanted() { [ ${#only[@]} -eq 0 ] || [[ " ${only[*]} " == *" $1 "* ]]; }

# All of it ends within this time and KILL_AFTER: what comes late gets what is left.
ALL_SECONDS=515
# pytest waits 10 s for its processes, torchrun for its ranks, before they say how it went.
KILL_AFTER=20

# step NAME SECONDS COMMAND...: runs it, shows the tests that failed and the end of what it said,
# remembers how it went. At its limit it gets the signal AT_LIMIT.
step() {
  local name="$1" limit="$2" begin="$SECONDS" status=0
  shift 2
  is_wanted "$name" || return 0
  if [ $((ALL_SECONDS - SECONDS)) -lt "$limit" ]; then limit=$((ALL_SECONDS - SECONDS)); fi
  if [ "$limit" -lt 5 ]; then
    late "$name"
    return
  fi
  timeout --signal="${AT_LIMIT:-TERM}" --kill-after="$KILL_AFTER" "$limit" "$@" > "$LOGS/$name.log" 2>&1 || status=$?
  echo "== $name"
  # The end of what ranks say is torchrun's.
  { grep -E '^(FAILED|ERROR) tests' "$LOGS/$name.log" || grep ' FAILED ' "$LOGS/$name.log"; } | tail -n 40
  tail -n 25 "$LOGS/$name.log"
  local outcome="ok"
  if [ "$status" -eq 124 ]; then
    outcome="stopped after $limit s"
  elif [ "$status" -ne 0 ]; then
    outcome="failed ($status)"
  fi
  [ "$status" -eq 0 ] || touch "$LOGS/failed"
  record "| $name | $outcome | $((SECONDS - begin)) s |"
}

# Not a step: its absence is no failure.
skip() {
  echo "== $1: $2"
  record "| $1 | not run: $2 | |"
}

late() {
  touch "$LOGS/failed"
  skip "$1" "no time was left"
}

# One of the steps that run at once after the other.
record() {
  (
    flock 9
    echo "$1" >> "$LOGS/rows"
    write_report
  ) 9> "$LOGS/lock"
}

# Of the steps so far, with their logs.
write_report() {
  local results target
  {
    echo "# $report"
    echo
    echo "| step | outcome | time |"
    echo "|---|---|---|"
    cat "$LOGS/rows"
    echo
    for results in kernels_cuda step_cuda; do
      cat "$RESULTS/$results.md" 2> /dev/null || echo "The benchmark $results left no results."
      echo
    done
  } > "$RESULTS/$report.md"
  "$PYTHON" - "$RESULTS" "$RESULTS/$report.json" << 'END'
import json, pathlib, sys

parts = {p.stem: json.loads(p.read_text()) for p in pathlib.Path(sys.argv[1]).glob("*_cuda.json")}
pathlib.Path(sys.argv[2]).write_text(json.dumps(parts, indent=1) + "\n")
END
  mkdir -p benchmarks/results
  for target in benchmarks/results ${OUT:+"$OUT"}; do
    cp "$RESULTS/$report".* "$target"/
  done
  if [ -n "${OUT:-}" ]; then tar -czf "$OUT/logs.tar.gz" -C "$LOGS" .; fi
}

# Where compute-sanitizer is, or why it cannot be used; asked for once.
sanitizer=""
no_sanitizer=""
find_sanitizer() {
  local found
  found="$(command -v compute-sanitizer || command -v "$CUDA_HOME/bin/compute-sanitizer")"
  if [ -z "$found" ]; then
    no_sanitizer="there is no compute-sanitizer"
    return
  fi
  timeout --kill-after=5 30 "$found" "$PYTHON" -c "import torch; torch.ones(8).cuda()" \
    > "$LOGS/sanitizer.log" 2>&1
  # Some virtual machines' drivers refuse the tool.
  if grep -q "Device not supported" "$LOGS/sanitizer.log"; then
    no_sanitizer="compute-sanitizer does not support this device here"
  else
    sanitizer="$found"
  fi
}

# sanitize TOOL OPTION...: a step of compute-sanitizer.
sanitize() {
  local tool="$1"
  shift
  is_wanted "$tool" || return 0
  if [ -z "$sanitizer$no_sanitizer" ]; then
    late "$tool"
  elif [ -n "$no_sanitizer" ]; then
    skip "$tool" "$no_sanitizer"
  else
    step "$tool" 100 "$sanitizer" --tool "$tool" --error-exitcode 7 "$@" \
      "$PYTHON" scripts/exercise_cuda_kernels.py
  fi
}

# NAME CAPABILITY. The first import of torch on a machine may take long.
gpu() {
  timeout --kill-after=5 150 "$PYTHON" -c "
import torch
print(torch.cuda.get_device_name().lower().replace(' ', '_'), end=' ')
print('%d.%d' % torch.cuda.get_device_capability())" 2> "$LOGS/gpu.log" || {
    cat "$LOGS/gpu.log" >&2
    return 1
  }
}

# nvcc knows where its toolkit is even where it is started through a script in another place.
toolkit() {
  local here
  here="$(nvcc --dryrun -E -x cu /dev/null 2>&1 | sed -n 's/^#\$ _HERE_=//p')"
  dirname "${here:-/usr/local/cuda/bin}"
}

found="$(gpu)" || exit 1
read -r name TORCH_CUDA_ARCH_LIST <<< "$found"
export TORCH_CUDA_ARCH_LIST
export CUDA_HOME="${CUDA_HOME:-$(toolkit)}"
# The commit may come from outside, where the folder travels without its history.
export COMMIT="${COMMIT:-$(git rev-parse --short HEAD 2> /dev/null || echo unknown)}"
report="${name}_$(date +%F)_$COMMIT"
for part in "${only[@]}"; do report+="_$part"; done

# Equal products have equal bits, wherever their factors lie, and those of fp32 are fp32's.
exact=(env CUBLAS_WORKSPACE_CONFIG=:4096:8 DISABLE_ADDMM_CUDA_LT=1 NVIDIA_TF32_OVERRIDE=0)
# One line for each: what is killed has told how far it came, and where it hung.
quick=(-v -p no:cacheprovider --tb=short --maxfail=200 -m)
# By address: the machine's own name may lead nowhere, for c10d's backends too.
export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
ranks=("$PYTHON" -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node)
# Small tests leave processors and the device idle: several processes at a time, where pytest can.
at_once=()
if "$PYTHON" -c "import xdist" 2> /dev/null; then at_once=(-n 6 --dist worksteal); fi

# The project's own tests on CUDA tensors: `on BACKENDS NAME SECONDS COMMAND...`. Interrupted, pytest
# still says what has failed; a test that hangs ends before all of them.
on() {
  local backends="$1" name="$2" limit="$3"
  shift 3
  ZERO_EXT_TEST_DEVICE=cuda ZERO_EXT_TEST_BACKENDS="$backends" OMP_NUM_THREADS=1 AT_LIMIT=INT \
    step "$name" "$limit" "${exact[@]}" "$@"
}
# Without what compiles for minutes, or is of the CPU.
without=(--ignore=tests/{device/test_lagged_device,memory/test_plan,module/test_compile,properties/test_pipeline}.py)
rooms=("${without[@]}" tests/{autograd,device,engine,gather,memory,module,optim,properties,reduce,state,step,tensor,units})
rooms+=(tests/deepspeed/test_{own_optimizers,initialize}.py)
devices=(tests/device/test_{devices,offloaded_parameters}.py)
gathers=(tests/{gather/test_stage3,properties/test_scenarios_c,module/test_errors}.py)
branches=("${gathers[0]}::test_"{gradients_are_one_process_s_bits,ranks_take_different_branches})
branches+=("${gathers[0]}::test_"{ranks_may_enter_a_unit_more_or_less_often,the_order_may_change_from_step_to_step})
branches+=("${gathers[0]}::test_one_rank_of_a_host_evaluates_and_saves_alone")
recovery=(tests/{engine/test_uneven,properties/test_recovery,checkpoint/test_checkpoint}.py)
owners=(tests/{optim/test_{owned,muon,state_dtype},deepspeed/test_own_optimizers}.py)

ZERO_EXT_CUDA=1 MAX_JOBS="$(nproc)" step build 180 "$PYTHON" setup.py build_ext --inplace
step info 20 "$PYTHON" -m zero_ext.info
step exercise 20 "$PYTHON" scripts/exercise_cuda_kernels.py

# All at once: each leaves processors and the device idle. What is measured runs alone, later.
if is_wanted memcheck || is_wanted racecheck; then
  # Asking alone may take half a minute.
  if [ $((ALL_SECONDS - SECONDS)) -ge 60 ]; then find_sanitizer; fi
fi
# Without conftest.py, which is about ranks and needs more than pytest.
OMP_NUM_THREADS=2 step test 180 "$PYTHON" -m pytest tests/kernels/test_cuda_kernels.py -q -p no:cacheprovider --noconftest \
  --maxfail=20 &
on cpu:gloo test_one_rank 180 "$PYTHON" -m pytest "${at_once[@]}" "${rooms[@]}" --timeout=60 \
  "${quick[@]}" "not dist and not slow" &
# Two ranks share the GPU, which NCCL refuses; gloo for the host alone has our staging carry all
# tensors, some of which plain "gloo" would take from the device itself.
for files in devices gathers recovery owners; do
  declare -n files_of="$files"
  on cpu:gloo "test_$files" 180 "${ranks[@]}" 2 -m pytest "${files_of[@]}" "${quick[@]}" "dist and not slow" &
done
# A group of NCCL's around one rank, which has nobody to send anything.
on cpu:gloo,cuda:nccl test_nccl 120 "${ranks[@]}" 1 -m pytest "${devices[@]}" "${gathers[0]}" \
  tests/optim/test_muon.py "${quick[@]}" "dist and not slow" &
# Ranks that read each other's memory on the one GPU, in torch's symmetric memory. NCCL would reject them,
# so gloo has what else they agree on: tests/support/device_gloo.py. Times say nothing, because a rank
# that waits for another one's words has the GPU meanwhile. Nothing shows here how memory is mapped
# between GPUs, in which order their writes become visible, or what happens without NVLink.
in_place() {
  ZERO_EXT_TEST_DIRECT=1 TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 on cpu:gloo,cuda:gccl "$@"
}
for n in 2 4 8; do
  in_place "test_in_place_$n" 150 "${ranks[@]}" "$n" -m pytest tests/device/test_peer_memory.py \
    "${branches[@]}" "${quick[@]}" "dist and not slow" &
done
in_place test_killed_rank 120 "$PYTHON" -m pytest tests/device/test_killed_rank.py "${quick[@]}" "not slow" &
if [ -n "${ZERO_EXT_NCCL:-}" ]; then
  on cpu:gloo,cuda:nccl test_two_of_nccl 150 env LD_PRELOAD="$ZERO_EXT_NCCL" NCCL_MULTI_RANK_GPU_ENABLE=1 \
    NCCL_MAX_CTAS=4 NCCL_NVLS_ENABLE=0 "${ranks[@]}" 2 -m pytest "${devices[@]}" "${gathers[0]}" \
    tests/properties/test_hybrid.py "${quick[@]}" "dist and not slow" &
elif is_wanted test_two_of_nccl; then
  skip test_two_of_nccl "ZERO_EXT_NCCL names no libnccl"
fi
# Without torch's caching allocator, whose tensors are cut from segments of 2 MB: what is written behind
# one would be inside of its segment. Libraries expect some calls of the API to fail.
PYTORCH_NO_CUDA_MEMORY_CACHING=1 sanitize memcheck --report-api-errors no &
# Mangled, the names of all our kernels contain that of our namespace.
sanitize racecheck --kernel-name kernel_substring=zero_ext &
wait

step benchmark 60 "$PYTHON" benchmarks/bench_cuda.py --results "$RESULTS"
step benchmark_step 150 "${ranks[@]}" 1 benchmarks/bench_cuda_step.py --results "$RESULTS"
# There is none where no step has a name that was given.
cat "$RESULTS/$report.md" || exit 1
[ ! -e "$LOGS/failed" ]
