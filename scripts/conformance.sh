#!/usr/bin/env bash
# Every case of `treeline conformance` against our picker, and where Go is against the inference extension's two.
#   scripts/conformance.sh [--ours] [ARGUMENTS]    --ours: ours alone; ARGUMENTS go to the command (--out bench/results)
# The exit status is that of our picker: 1 when it fails a MUST.
set -euo pipefail
cd "$(dirname "$0")/.."

only_ours=
[ "${1:-}" != --ours ] || { only_ours=1; shift; }

PATH=$PWD/.venv/bin:$PATH
ports="--grpc-port {port} --grpc-health-port {health_port} --metrics-port {metrics_port} --health-checking=true"
pool="--pool-name {pool} --pool-namespace {namespace} --secure-serving=false"
pods="--endpoint a={pod0} --endpoint b={pod1} --endpoint c={pod2}"
# Conformance headers, as a picker in the conformance tests of Gateways has them; objectives by header, as behind a Gateway.
start=(--start "Treeline=treeline pick $pool $ports --admin-port {admin_port} --conformance-headers --metrics-families treeline,gie"
  --start "Treeline (without Kubernetes)=treeline pick $pods $ports --admin-port {admin_port} --trust-request-headers true --metrics-families treeline,gie")
if [ -z "$only_ours" ]; then
  mapfile -t folders < <(scripts/control_plane.sh gie-picker lwepp-picker)
  PATH=$PATH:${folders[0]}:${folders[1]}
  # Without authentication of metrics: the suite's API has no tokens to review.
  start+=(--against "GIE 1.5=gie-picker $pool $ports --metrics-endpoint-auth=false --tracing=false --enable-pprof=false"
    --against "lwepp 1.6=lwepp-picker $pool $ports")
fi
exec treeline conformance "${start[@]}" "$@"
