#!/usr/bin/env bash
# Build the container images with docker, podman or buildah, whichever is here.
#   scripts/images.sh [OPTION…] [IMAGE…] [-- ARGUMENT…]     IMAGE: operator epp edge runtime-cpu runtime-cuda (default: all but the last)
#   --tool NAME           docker, podman or buildah (default: the first of them that works)
#   --registry PREFIX     in front of the names: PREFIX/treeline-epp
#   --tag TAG             default: the chart's appVersion; the runtime's gets -cpu or -cuda
#   --platform LIST       such as linux/amd64,linux/arm64 (default: this machine's)
#   --base IMAGE          base image with Python 3.11 and pip (default: the one that the Dockerfiles pin)
#   --build-arg K=V       handed on, several times if need be: PIP_INDEX_URL, TORCH_CPU_INDEX_URL
#   --push                push what was built (for several platforms docker can do nothing else); where cosign is installed, what
#                         was pushed is then signed and gets its SBOM attached, both by digest (COSIGN_KEY=FILE, else keyless)
#   --no-sign             push without signing, though cosign is here
#   --dry-run             only print the commands
# What follows -- goes to the builder as it is, for example: -- --isolation chroot
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; }
say() { printf 'images: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

all=(operator epp edge runtime-cpu runtime-cuda)
tool= registry= platform= push= dry= sign=1
tag=$(sed -n 's/^appVersion: *//p' charts/treeline/Chart.yaml)
images=() build_args=() rest=()

while [ $# -gt 0 ]; do
  case $1 in
    --tool|--registry|--tag|--platform|--base|--build-arg)
      [ $# -gt 1 ] || die "$1 needs a value"
      case $1 in
        --base) build_args+=(--build-arg "BASE_IMAGE=$2") ;;
        --build-arg) build_args+=(--build-arg "$2") ;;
        *) printf -v "${1#--}" %s "$2" ;;
      esac
      shift 2 ;;
    --push) push=1; shift ;;
    --no-sign) sign=; shift ;;
    --dry-run) dry=1; shift ;;
    --help|-h) usage; exit 0 ;;
    --) shift; rest=("$@"); break ;;
    -*) die "no option '$1'; see scripts/images.sh --help" ;;
    *) case " ${all[*]} " in *" $1 "*) images+=("$1") ;; *) die "no image '$1'; there are: ${all[*]}" ;; esac; shift ;;
  esac
done
[ ${#images[@]} -gt 0 ] || images=(operator epp edge runtime-cpu)

works() { # a docker command without its daemon builds nothing
  case $1 in
    docker) docker info >/dev/null 2>&1 ;;
    *) command -v "$1" >/dev/null ;;
  esac
}

if [ -z "$tool" ]; then
  for candidate in docker podman buildah; do
    if works $candidate; then tool=$candidate; break; fi
  done
  [ -n "$tool" ] || [ -n "$dry" ] ||
    die "nothing here builds images: start Docker's daemon, or install podman or buildah (apt-get install buildah)"
  tool=${tool:-docker}
fi
case $tool in docker|podman|buildah) ;; *) die "no tool '$tool'; there are docker, podman, buildah" ;; esac

command_of() { # the words before the options
  case $tool in
    docker) if [ -n "$platform" ] || [ -n "$push" ]; then echo docker buildx build; else echo docker build; fi ;;
    podman) echo podman build ;;
    buildah) echo buildah build --format docker --layers ;; # torch keeps its own
  esac
}

run() {
  if [ -n "$dry" ]; then printf '%q ' "$@"; echo; else "$@"; fi
}

if [ -n "$push" ] && [ -n "$sign" ] && ! command -v cosign >/dev/null; then
  say "cosign is not installed: what is pushed is not signed and has no SBOM attached"
  sign=
fi
digests=$(mktemp -d)
trap 'rm -rf "$digests"' EXIT
[ -z "$push" ] || [ -z "$sign" ] || [ -n "$dry" ] || [ -x .venv/bin/python ] || scripts/setup.sh # the SBOM describes the packages installed here

digest_of() { # IMAGE: what the registry calls what was just pushed
  local file=$digests/$1
  if [ -n "$dry" ]; then echo "sha256:DIGEST"; return; fi
  grep -oE 'sha256:[0-9a-f]{64}' <(if [ "$tool" = docker ]; then grep -E '"containerimage.digest":' "$file"; else cat "$file"; fi) | head -1
}

attest() { # IMAGE NAME: sign and attach the SBOM, to the digest: a tag can be moved
  local digest target sbom=dist/sbom/$1.cdx.json key=(${COSIGN_KEY:+--key "$COSIGN_KEY"})
  digest=$(digest_of "$1") || die "$tool did not say under which digest $2 was pushed: it is not signed"
  target=${2%:*}@$digest
  run .venv/bin/python scripts/sbom.py "$1"
  run cosign sign --yes "${key[@]}" "$target"
  run cosign attest --yes "${key[@]}" --type cyclonedx --predicate "$sbom" "$target"
}

revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[ -z "$(git status --porcelain 2>/dev/null)" ] || revision+=-dirty
several=
[[ $platform == *,* ]] && several=1

for image in "${images[@]}"; do
  file=images/${image%%-*}.Dockerfile
  name=${registry:+${registry%/}/}treeline-${image%%-*}:$tag
  options=(--build-arg "VERSION=$tag" --build-arg "REVISION=$revision")
  if [[ $image == runtime-* ]]; then
    name+=-${image#*-}
    options+=(--build-arg "ACCELERATOR=${image#*-}")
  fi
  [ -z "$platform" ] || options+=(--platform "$platform")
  case $tool in
    docker)
      options+=(--tag "$name")
      if [ -n "$push" ]; then options+=(--push --metadata-file "$digests/$image"); elif [ -n "$several" ]; then die "docker keeps no image for several platforms: add --push"
      elif [ -n "$platform" ]; then options+=(--load); fi ;;
    *) if [ -n "$several" ]; then options+=(--manifest "$name"); else options+=(--tag "$name"); fi ;;
  esac
  say "building $name with $tool"
  # shellcheck disable=SC2046  # the command is several words
  run $(command_of) --file "$file" "${options[@]}" "${build_args[@]}" "${rest[@]}" .
  if [ -n "$push" ] && [ "$tool" != docker ]; then
    if [ -n "$several" ]; then run "$tool" manifest push --all --digestfile "$digests/$image" "$name" "docker://$name"
    else run "$tool" push --digestfile "$digests/$image" "$name"; fi
  fi
  [ -z "$push" ] || [ -z "$sign" ] || attest "$image" "$name"
done
