#!/usr/bin/env bash
# sanitize.sh TARGET PYTHON: a build of its own with sanitizers, and a slice of the quick tests on one and on
# two ranks. TARGET is `sanitize` (addresses, undefined behaviour) or `tsan` (threads). Python itself is built
# without: the libraries come first by LD_PRELOAD. Each report is in a file, and fails the script.
# Left out: what asks malloc for its own figures, and programs that are compiled without sanitizers.
set -euo pipefail
target=$1 python=$2 folder=$PWD/build/$1
report=log_path=$folder/report
case $target in
sanitize)
  sanitizers=address,undefined runtimes="asan ubsan"
  export UBSAN_OPTIONS=$report:print_stacktrace=1:halt_on_error=1
  asan=detect_leaks=0:detect_odr_violation=0:verify_asan_link_order=0:detect_container_overflow=0
  export ASAN_OPTIONS=$report:$asan
  ;;
tsan)
  # It ignores the accesses of libraries that are built without. A thread with 64 locks would end its search
  # for deadlocks.
  sanitizers=thread runtimes=tsan
  tsan=ignore_noninstrumented_modules=1:detect_deadlocks=0:suppressions=$PWD/tests/support/tsan.supp
  export TSAN_OPTIONS=$report:$tsan
  ;;
esac
rm -f "$folder"/report.*
ZERO_EXT_SANITIZE=$sanitizers ZERO_EXT_WERROR=0 ZERO_EXT_CUDA=0 PATH="$PWD/$(dirname "$python"):$PATH" \
  "$python" setup.py --quiet build --build-lib "$folder/lib" --build-temp "$folder/temp"

libraries=$(for name in $runtimes stdc++; do "${CXX:-g++}" -print-file-name="lib$name.so"; done | tr '\n' ' ')
tests() { "$python" tests/support/segments.py --tests "$target-$1"; }
sanitized() { PYTHONPATH="$folder/lib" LD_PRELOAD="$libraries" "$@"; }
status=0
# shellcheck disable=SC2046
sanitized "$(dirname "$python")/pytest" -n 2 --dist worksteal -m "not dist and not slow" -k "not with_the_allocator" \
  $(tests one-rank) || status=1
# shellcheck disable=SC2046
sanitized "$python" -m torch.distributed.run --standalone --nproc-per-node 2 --no-python "$(dirname "$python")/pytest" \
  -p no:cacheprovider -m "dist and not slow" $(tests 2-ranks) || status=1
if ls "$folder"/report.* 2> /dev/null; then
  cat "$folder"/report.*
  status=1
fi
exit $status
