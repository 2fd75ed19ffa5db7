"""Faults of a container, made from within it: killed without warning, out of memory, hanging."""

from __future__ import annotations

from typing import Any, Final

from treeline_wire import ports

from e2e.kit.kube import Kube

_OTHERS: Final = """
import os, signal, time
others = [int(name) for name in os.listdir('/proc') if name.isdigit() and int(name) not in (1, os.getpid())]
"""
_KILL: Final = "for pid in others: os.kill(pid, signal.SIGKILL)"
_AT_WORK: Final = f"""
import json, urllib.request
while not json.load(urllib.request.urlopen('http://127.0.0.1:{ports.RUNTIME_HTTP}/v1/loads'))['loads'][0]['num_total_reqs']:
    time.sleep(0.002)
"""
_STOP: Final = _OTHERS + "for pid in others: os.kill(pid, signal.SIGSTOP)"
_EAT: Final = """
for pid in victims:
    open(f'/proc/{pid}/oom_score_adj', 'w').write('1000')
while all(os.path.exists(f'/proc/{pid}') for pid in victims):
    if os.fork() == 0:
        eaten = b'x' * (32 << 20)
        time.sleep(60)
        os._exit(0)
    time.sleep(0.005)
"""
"""Many small processes fill the memory, so that the kernel ends one of the victims."""

HANGS: Final[dict[str, Any]] = {
    "spec": {
        # The runtime's first process is then not the container's, so that it can be stopped like the others.
        "shareProcessNamespace": True,
        "containers": [
            {
                "name": "runtime",
                "livenessProbe": {
                    "periodSeconds": 2,
                    "timeoutSeconds": 2,
                    "failureThreshold": 3,
                    "terminationGracePeriodSeconds": 2,
                },
            }
        ],
    }
}
"""A pool's template: the kubelet sees a hanging runtime in seconds instead of in a minute."""


def kill_runtime(kube: Kube, pod: dict[str, Any]) -> None:
    """Send SIGKILL to all processes of a runtime except the container's first, which no process inside can kill."""
    _run(kube, pod, _OTHERS + _KILL)


def kill_runtime_at_work(kube: Kube, pod: dict[str, Any]) -> None:
    """Kill a runtime as soon as it has a request."""
    _run(kube, pod, _OTHERS + _AT_WORK + _KILL)


def stop_runtime(kube: Kube, pod: dict[str, Any]) -> None:
    """Make a runtime hang: SIGSTOP to all its processes. For pods that have the template HANGS."""
    _run(kube, pod, _STOP)


def fill_memory(kube: Kube, pod: dict[str, Any]) -> None:
    """Take memory in a runtime's container until the kernel ends one of the runtime's processes."""
    _run(kube, pod, _OTHERS + "victims = others" + _EAT)


def kill_first_process(kube: Kube, pod: dict[str, Any]) -> None:
    """Kill the only process of a container. Only the kernel can, when memory runs out."""
    _run(kube, pod, "import os, time\nvictims = [1]" + _EAT)


def _run(kube: Kube, pod: dict[str, Any], script: str) -> None:
    """Run a script in the container. It may kill the container, and its own command with it."""
    meta = pod["metadata"]
    kube.kubectl("-n", meta["namespace"], "exec", meta["name"], "--", "python3", "-c", script, check=False)
