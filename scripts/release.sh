#!/usr/bin/env bash
# Build all that a release has into dist/release, from the tag on this commit. Nothing is pushed.
#   scripts/release.sh [OPTION…]
#   --dry-run      on any commit, with a development version and whatever CHANGELOG.md says first
#   --no-images    leave the container images out, though docker, podman or buildah is here
# dist/release then has:
#   python/        wheels and sdists                    chart/       the chart: a package, and an OCI layout in a tar
#   sbom/          CycloneDX of each image              install.yaml what the chart installs, without Helm
#   NOTES.md       this version's part of CHANGELOG.md  IMAGES       the names of the images, which the builder keeps
#   SHA256SUMS     of all files: sha256sum --check SHA256SUMS
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; }
say() { printf 'release: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

dry= images=1
for word in "$@"; do
  case $word in
    --dry-run) dry=1 ;;
    --no-images) images= ;;
    --help|-h) usage; exit 0 ;;
    *) die "no option '$word'; see scripts/release.sh --help" ;;
  esac
done

py=$PWD/.venv/bin/python
[ -x "$py" ] || die "there is no .venv: run make setup"
version=$("$py" scripts/dist.py --version)
semver=$("$py" scripts/dist.py --semver)
section() { awk -v version="$1" '/^## / {on = $2 == version; next} on' CHANGELOG.md; }

noted=$version
if [ -n "$dry" ]; then
  noted=$(sed -n 's/^## \([^ ]*\).*/\1/p' CHANGELOG.md | head -1)
else
  [ -z "$(git status --porcelain)" ] || die "there are changes that are not committed: commit them, or try with --dry-run"
  [[ $version != *.dev* ]] || die "this commit has no tag: git tag -s vX.Y.Z, or try with --dry-run"
  heading=$(grep -E "^## ${version//./\\.}( |$)" CHANGELOG.md) || die "CHANGELOG.md has no section '## $version (DATE)': write it, and tag that commit"
  grep -qE '\([0-9]{4}-[0-9]{2}-[0-9]{2}\)$' <<<"$heading" || die "CHANGELOG.md says '$heading': put the date into it, and tag that commit"
fi
helm=$(cd scripts && "$py" -c 'import install_manifest; print(install_manifest.helm())')

out=$PWD/dist/release
rm -rf "$out"
mkdir -p "$out/chart"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say "$version: wheels and sdists"
"$py" scripts/dist.py --out "$out/python" >/dev/null
"$py" scripts/dist.py --tree "$work"

say "$semver: the chart"
"$helm" package "$work/charts/treeline" --destination "$out/chart" >/dev/null
"$py" scripts/chart_layout.py "$out/chart/treeline-$semver.tgz" "$out/chart/treeline-$semver.oci.tar"
HELM=$helm "$py" "$work/scripts/install_manifest.py"
cp "$work/manifests/install.yaml" "$out/install.yaml"

say "SBOMs"
"$py" scripts/sbom.py --version "$version" --out "$out/sbom" >/dev/null

if [ -z "$images" ]; then
  say "the images are left out, as --no-images says"
elif docker info >/dev/null 2>&1 || command -v podman buildah >/dev/null; then
  names=(operator epp edge runtime-cpu runtime-cuda)
  options=(--tag "$semver" --build-arg "REVISION=$(git rev-parse HEAD)")
  "$work/scripts/images.sh" "${options[@]}" "${names[@]}"
  "$work/scripts/images.sh" --dry-run "${options[@]}" "${names[@]}" 2>/dev/null | grep -oE 'treeline-[a-z]+:[^ ]+' | sort -u > "$out/IMAGES"
else
  say "no docker, podman or buildah here: the images are left out"
fi

section "$noted" | sed '/./,$!d' > "$out/NOTES.md"
(cd "$out" && find . -type f ! -name SHA256SUMS -printf '%P\n' | LC_ALL=C sort | xargs -d '\n' sha256sum > SHA256SUMS)
say "$version is in dist/release, $(wc -l < "$out/SHA256SUMS") files; nothing was pushed"
