#!/usr/bin/env bash
# One run of at most 8 minutes on a machine with a GPU: correctness and speed of every kernel, the default model end to
# end, CUDA graphs. Each part is a process of its own with a time limit, and keeps what it has found so far; results are
# JSON files in $OUT (at most 8 files). Needs the project's Python packages, no network.
#
#   OUT=results benchmarks/gpu_checks.sh            # everything
#   benchmarks/gpu_checks.sh cases timing           # some parts
#   EAGLEJAX_GPU_DRY=1 benchmarks/gpu_checks.sh     # on a CPU, a few small cases, to try the script itself
set -uo pipefail # a part that fails must not stop the others
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${OUT:-benchmarks/results/gpu}
python=${PYTHON:-python3}
deadline=$((SECONDS + ${EAGLEJAX_GPU_SECONDS:-470}))
wanted=" $* "
mkdir -p "$out"
log=$out/log.txt
: >"$log"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
export XLA_PYTHON_CLIENT_PREALLOCATE=false LLVM_DISABLE_SYMBOLIZATION=1
if [ "${EAGLEJAX_GPU_DRY:-}" = 1 ]; then export JAX_PLATFORMS=cpu; fi
lines=()

part() { # part NAME SECONDS: runs benchmarks.gpu.NAME within its own limit and what is left of the whole
	local name=$1 limit=$2 left=$((deadline - SECONDS)) started=$SECONDS status
	if [ "$wanted" != "  " ] && [[ "$wanted" != *" $name "* ]]; then return; fi
	if [ "$limit" -gt "$left" ]; then limit=$left; fi
	if [ "$limit" -lt 5 ]; then
		status=-1
	else
		echo "== $name (at most $limit s)" | tee -a "$log"
		timeout --kill-after=5 "$limit" "$python" -m "benchmarks.gpu.$name" "$out/$name.json" >>"$log" 2>&1
		status=$?
	fi
	echo "   exit status $status after $((SECONDS - started)) s"
	lines+=("{\"part\": \"$name\", \"status\": $status, \"seconds\": $((SECONDS - started))}")
	(IFS=,; printf '{"parts": [%s]}\n' "${lines[*]}") >"$out/summary.json"
}

part environment 20
part cases 120
part smollm2 90
part graphs 40
part timing 150
part peers 40

# The log stays small whatever the compiler prints.
tail -c 4000000 "$log" >"$log.tmp" && mv "$log.tmp" "$log"
rm -f "$out"/*.tmp
# Status -1: no time was left; 124: over its limit. Anything but 0 is a failure.
! grep -qE '"status": (-|[1-9])' "$out/summary.json"
