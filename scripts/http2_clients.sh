#!/usr/bin/env bash
# Build the programs that try the picker's HTTP/2, once, and print the path of each.
#   scripts/http2_clients.sh [--check] [NAME…]    NAME is a folder of tests/http2_clients (default: all)
#   --check               build nothing: exit 3 when something is missing
#   TREELINE_CACHE=DIR    where they are kept (default ~/.cache/treeline): DIR/bin/http2-NAME-HASH/
# go and h2spec need Go 1.26, rust needs cargo and a C compiler.
set -euo pipefail
cd "$(dirname "$0")/.."

sources=tests/http2_clients
cache=${TREELINE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/treeline}/bin

say() { printf 'http2-clients: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

folder_of() { # NAME: changed sources are another folder
  local hash
  hash=$(cd "$sources/$1" && find . -type f -not -path './target/*' -not -name Cargo.lock | LC_ALL=C sort | xargs sha256sum | sha256sum)
  echo "$cache/http2-$1-${hash:0:10}"
}

go_build() { # NAME PACKAGE FOLDER
  command -v go >/dev/null || die "no Go here: https://go.dev/dl"
  (cd "$sources/$1" && CGO_ENABLED=0 GOTOOLCHAIN=local GOWORK=off GOFLAGS=-mod=readonly \
    go build -p 2 -trimpath -buildvcs=false -ldflags "-s -w" -o "$3/$1" "$2") >&2
}

rust_build() { # NAME FOLDER
  command -v cargo >/dev/null || die "no cargo here: https://rustup.rs"
  (cd "$sources/$1" && cargo build --release --jobs 2 --target-dir "$2/target") >&2 &&
    mv "$2/target/release/http2-rust" "$2/$1" && rm -rf "$2/target"
}

build() { # NAME FOLDER
  local start=$SECONDS
  work=$(mktemp -d "$cache/.http2-$1.XXXXXX")
  say "building $1"
  case $1 in
    go) go_build go . "$work" ;;
    h2spec) go_build h2spec github.com/summerwind/h2spec/cmd/h2spec "$work" ;;
    rust) rust_build rust "$work" ;;
  esac || die "building $1 failed (see above)"
  chmod 755 "$work"
  mv -T "$work" "$2" 2>/dev/null || [ -d "$2" ] || die "$2 cannot be written" # somebody else may have built it meanwhile
  say "built $1 in $((SECONDS - start)) s: $2"
}

work=
trap '[ -z "$work" ] || rm -rf "$work"' EXIT
check=
[ "${1:-}" != --check ] || { check=1; shift; }
[ $# -gt 0 ] || set -- go h2spec rust

for name in "$@"; do
  [ -d "$sources/$name" ] || die "no program '$name': there are go, h2spec, rust"
  folder=$(folder_of "$name")
  if [ ! -d "$folder" ]; then
    [ -z "$check" ] || { say "$name is not built: run scripts/http2_clients.sh $name"; exit 3; }
    mkdir -p "$cache"
    build "$name" "$folder"
  fi
  echo "$folder/$name"
done
