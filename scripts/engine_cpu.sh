#!/usr/bin/env bash
# A real vLLM or SGLang for machines without a GPU, in an environment of its own: what the proofs with foreign engines start.
# Prints its Python. A second run finds its stamp and returns at once.
#   scripts/engine_cpu.sh vllm|sglang
#   TREELINE_VLLM_CPU=DIR, TREELINE_SGLANG_CPU=DIR   where it is (default .cache/vllm-cpu, .cache/sglang-cpu)
#   TORCH_BACKEND=cpu                                the build of torch, as for `make setup`
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
  vllm) folder=${TREELINE_VLLM_CPU:-.cache/vllm-cpu} size="2 GB" cpu=avx2 torch="torch|triton" probe="import torch, vllm.version" ;;
  sglang) folder=${TREELINE_SGLANG_CPU:-.cache/sglang-cpu} size="4 GB" cpu=sse4_2 torch="torch|torchvision" probe="import torchvision, sglang" ;;
  *) echo "scripts/engine_cpu.sh vllm|sglang" >&2; exit 2 ;;
esac
word=$1-cpu
lock=requirements/$word.txt
backend=${TORCH_BACKEND:-}
python=$folder/bin/python

say() { printf '%s: %s\n' "$word" "$*" >&2; }
die() { say "$*"; exit 1; }

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || die "the wheel is for Linux on x86-64"
grep -q "$cpu" /proc/cpuinfo || die "it needs ${cpu^^}, which this processor lacks"

stamp=$({ echo "$backend"; cat "$lock"; [ "$1" != sglang ] || cat scripts/sgl_kernel.py; } | sha256sum | cut -d' ' -f1)
if [ "$(cat "$folder/.stamp" 2>/dev/null || true)" != "$stamp" ]; then
  say "installing $(grep -oE "^$1(-cpu)?==[^ ]*" "$lock") into $folder ($size beside what .venv has, minutes the first time)"
  .venv/bin/uv venv --quiet --clear --python .venv/bin/python "$folder"
  uv_install() { .venv/bin/uv pip install --quiet --no-deps --python "$python" "$@"; }
  if [ -z "$backend" ]; then
    uv_install --require-hashes -r "$lock"
  else # that build's files have other hashes, and no CUDA libraries
    built="^($torch|nvidia-[^=]*|cuda-[^=]*)=="
    uv_install --require-hashes -r <(awk -v built="$built" '/^[^ ]/ {on = $0 !~ built || /^nvidia-ml-py==/} on' "$lock")
    # shellcheck disable=SC2046 # one word each
    uv_install --torch-backend "$backend" $(grep -oE '^torch(vision)?==[^ ]*' "$lock")
  fi
  if [ "$1" = sglang ]; then
    cp scripts/sgl_kernel.py "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  fi
  "$python" -c "$probe" || die "what was installed cannot be imported: remove $folder and run this again"
  echo "$stamp" > "$folder/.stamp"
fi
echo "$python"
