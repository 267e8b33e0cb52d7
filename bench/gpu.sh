#!/usr/bin/env bash
# All that is to be measured on a machine with a GPU: bash bench/gpu.sh
#
# The output of every part goes to bench/gpu-DATE.md, under the command that made it. A part that
# fails is noted there and the next one runs; the exit status is then 1.
set -e -o pipefail
cd "$(dirname "$0")/.."
card=$(python -c 'import torch; print(torch.cuda.get_device_name())' 2>/dev/null) ||
    { echo "bench/gpu.sh: torch sees no GPU here" >&2; exit 1; }
out="bench/gpu-$(date +%F).md"
failed=0

say() { printf '%s\n' "$@" | tee -a "$out"; }

# part table|text COMMAND: tables are markdown already, text is fenced
part() {
    local fence=()
    [ "$1" = table ] || fence=('```')
    shift
    say "" "## \`$*\`" "" "${fence[@]}"
    "$@" 2>&1 | tee -a "$out" || { say "" "FAILED: exit status ${PIPESTATUS[0]}"; failed=1; }
    say "${fence[@]}"
}

: > "$out"
say "# $card, $(date '+%F %H:%M')" "" "commit $(git describe --always --dirty 2>/dev/null || echo unknown)"
part text python -m pytest -q tests/test_triton.py tests/test_kernels.py
part table python bench/gpu.py
part table python bench/gpu.py --step configs/gpt2-124m.yaml
part table python bench/gpu.py --step configs/llama3-1b.yaml
part text python bench/ops.py
part table python bench/compare.py --only checkpoint data --out ''
say "" "In $out"
exit $failed
