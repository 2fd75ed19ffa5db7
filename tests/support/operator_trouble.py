"""Pods in every kind of trouble, with statuses as kubelets and schedulers write them, and the reason of each."""

from __future__ import annotations

from typing import Any

from treeline_operator.api.conditions import Reason

from support.operator_status import container, event

POD = "tiny-1"


def unscheduled(message, reason="Unschedulable"):
    return {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": reason, "message": message}],
    }


def runtime(state, **fields):
    return {"phase": "Pending", "containerStatuses": [container("runtime", state, **fields)]}


def init(state, **fields):
    waits = container("runtime", {"waiting": {"reason": "PodInitializing"}})
    return {
        "phase": "Pending",
        "initContainerStatuses": [container("model", state, **fields)],
        "containerStatuses": [waits],
    }


def ended(code, reason="Error", message=""):
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}}


def crashed(restarts, code, reason="Error", message=""):
    """The runtime has not been restarted yet."""
    return runtime(BACK_OFF, restartCount=restarts, lastState=ended(code, reason, message))


def waits(reason, message=""):
    return runtime({"waiting": {"reason": reason} | ({"message": message} if message else {})})


RUNNING = {"running": {"startedAt": "2026-11-20T11:58:00Z"}}
CREATING = {"waiting": {"reason": "ContainerCreating"}}
NOT_FOUND = "failed to pull and unpack image: registry.example/runtime:1: not found"
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 3\nValueError: bad \x1b[31mpage\x1b[0m size\n\n'
USAGE = (
    "usage: treeline serve MODEL [FLAG …]\n"
    "treeline serve: error: unrecognized arguments: --prt 9000\nTry 'treeline serve --help'.\n"
)
NO_FOLDER = (
    "INFO    http        listening on http://0.0.0.0:8000\n"
    "treeline serve: error: --model: there is no folder '/nope' (and it is no Hugging Face id)\n"
)
ENGINE_CORE = (
    "(EngineCore pid=7) ERROR 11-20 11:58:00 ValueError: --block-size 7 is not supported\n"
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
)
PULL = f'Failed to pull image "registry.example/runtime:1": {NOT_FOUND}'

# name: (status, reason, part of the message, the events about it …)
TROUBLES: dict[str, tuple[Any, ...]] = {
    "no GPU": (
        unscheduled(
            "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available: "
            "3 No preemption victims found for incoming pod."
        ),
        Reason.INSUFFICIENT_CAPACITY,
        "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    ),
    "unbound claim": (
        unscheduled("0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims."),
        Reason.VOLUME_NOT_READY,
        "unbound immediate PersistentVolumeClaims",
    ),
    "absent claim": (
        unscheduled('0/3 nodes are available: persistentvolumeclaim "weights" not found.'),
        Reason.VOLUME_NOT_READY,
        '"weights" not found',
    ),
    "gate": (
        unscheduled("Scheduling is blocked due to non-empty scheduling gates", "SchedulingGated"),
        Reason.PODS_STARTING,
        "scheduling gate",
    ),
    "evicted": (
        {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."},
        Reason.INSUFFICIENT_CAPACITY,
        "Evicted: The node was low on resource: memory.",
    ),
    "image, first": (
        waits("ErrImagePull", NOT_FOUND),
        Reason.IMAGE_PULL_FAILING,
        f"image registry.example/runtime:1 of container runtime: {NOT_FOUND}",
    ),
    "image, back-off": (
        waits("ImagePullBackOff", f'Back-off pulling image "registry.example/runtime:1": ErrImagePull: {NOT_FOUND}'),
        Reason.IMAGE_PULL_FAILING,
        f"image registry.example/runtime:1 of container runtime: {NOT_FOUND}",
    ),
    "image, back-off of an old kubelet": (
        waits("ImagePullBackOff", 'Back-off pulling image "registry.example/runtime:1"'),
        Reason.IMAGE_PULL_FAILING,
        f"image registry.example/runtime:1 of container runtime: {NOT_FOUND}",
        event(POD, "Failed", "Error: ImagePullBackOff"),
        event(POD, "Failed", PULL),
    ),
    "image, nothing said": (waits("ImagePullBackOff"), Reason.IMAGE_PULL_FAILING, "it cannot be pulled"),
    "crash": (
        crashed(4, 1, message=TRACEBACK),
        Reason.CRASH_LOOPING,
        "container runtime ended with exit code 1 (4 restarts); its last line: ValueError: bad page size",
    ),
    "crash, silent": (crashed(1, 2), Reason.CRASH_LOOPING, "exit code 2 (1 restart); it logged nothing"),
    "crash, between two ends": (
        runtime(RUNNING, restartCount=2, started=False, lastState=ended(1, message="boom")),
        Reason.CRASH_LOOPING,
        "its last line: boom",
    ),
    "crash, just now": (runtime(ended(3, message="boom")), Reason.CRASH_LOOPING, "exit code 3"),
    "killed for memory": (
        crashed(2, 137, "OOMKilled"),
        Reason.OUT_OF_MEMORY,
        "more memory than its limit (2 restarts)",
    ),
    "device memory": (
        crashed(2, 1, message="torch.OutOfMemoryError: CUDA out of memory. 2 GiB"),
        Reason.MODEL_TOO_LARGE,
        "CUDA out of memory",
    ),
    "liveness": (
        runtime(RUNNING, restartCount=2, lastState=ended(137)),
        Reason.PROBE_FAILING,
        "container runtime was restarted (2 restarts): Liveness probe failed: HTTP probe failed with statuscode: 500",
        event(POD, "Unhealthy", "Liveness probe failed: HTTP probe failed with statuscode: 500"),
    ),
    "another port, ended when asked to": (
        runtime(RUNNING, restartCount=3, started=False, lastState=ended(0, "Completed", "bye")),
        Reason.PROBE_FAILING,
        "container runtime was restarted (3 restarts): Startup probe failed: dial tcp 10.0.0.5:8000",
        event(POD, "Unhealthy", "Startup probe failed: dial tcp 10.0.0.5:8000: connect: connection refused"),
    ),
    "another port, in back-off": (
        crashed(3, 0, "Completed"),
        Reason.PROBE_FAILING,
        "Startup probe failed: connection refused",
        event(POD, "Unhealthy", "Startup probe failed: connection refused"),
    ),
    "ends well again and again": (
        runtime(RUNNING, restartCount=2, started=False, lastState=ended(0, "Completed")),
        Reason.CRASH_LOOPING,
        "ended with exit code 0 (2 restarts)",
    ),
    "a flag that there is not": (
        crashed(3, 2, message=USAGE),
        Reason.CRASH_LOOPING,
        "its last line: treeline serve: error: unrecognized arguments: --prt 9000",
    ),
    "an error that points back": (
        crashed(3, 1, message=ENGINE_CORE),
        Reason.CRASH_LOOPING,
        "ValueError: --block-size 7 is not supported",
    ),
    "no folder of weights": (crashed(3, 1, message=NO_FOLDER), Reason.WEIGHTS_MISSING, "there is no folder '/nope'"),
    "no folder of weights, vLLM": (
        crashed(
            3,
            1,
            message="pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, Invalid repository ID or local directory specified: '/nope'.\n"
            "    For further information visit https://errors.pydantic.dev/2.12/v/value_error\n",
        ),
        Reason.WEIGHTS_MISSING,
        "Invalid repository ID or local directory specified: '/nope'",
    ),
    "readiness": (
        runtime(RUNNING, started=True),
        Reason.PROBE_FAILING,
        "container runtime runs, but: Readiness probe failed: HTTP probe failed with statuscode: 503",
        event(POD, "Unhealthy", "Readiness probe failed: an older one", last="2026-11-20T11:00:00Z"),
        event(POD, "Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 503"),
    ),
    "not ready yet": (runtime(RUNNING, started=True), Reason.PODS_STARTING, "runs and is not ready yet"),
    "loading": (
        runtime(RUNNING, started=False),
        Reason.MODEL_LOADING,
        "has not passed its start-up probe yet",
        event(POD, "Unhealthy", "Startup probe failed: connection refused"),
    ),
    "downloading": (init(RUNNING), Reason.WEIGHTS_DOWNLOADING, "the weights are being downloaded"),
    "download failed": (
        init(
            BACK_OFF,
            restartCount=3,
            lastState=ended(1, message="DownloadFailed: org/name is gated and there is no token"),
        ),
        Reason.DOWNLOAD_FAILED,
        "container model: org/name is gated and there is no token",
    ),
    "too large for the volume": (
        init(ended(1, message="ModelTooLarge: 16.1 GiB are needed, 10.0 GiB are free")),
        Reason.MODEL_TOO_LARGE,
        "16.1 GiB are needed",
    ),
    "no weights": (
        init(ended(1, message="fetching\nWeightsMissing: org/name has no *.safetensors")),
        Reason.WEIGHTS_MISSING,
        "org/name has no *.safetensors",
    ),
    "absent token": (
        init({"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "hf-token" not found'}}),
        Reason.CONFIG_ERROR,
        'container model: secret "hf-token" not found',
    ),
    "bad command": (
        waits("RunContainerError", 'exec: "serve": executable file not found in $PATH'),
        Reason.CONFIG_ERROR,
        'exec: "serve": executable file not found',
    ),
    "absent keys": (
        runtime(CREATING),
        Reason.KEY_SECRET_MISSING,
        'secret "treeline-kv-keys" not found',
        event(POD, "FailedMount", 'MountVolume.SetUp failed for volume "keys" : secret "treeline-kv-keys" not found'),
    ),
    "mount": (
        runtime(CREATING),
        Reason.VOLUME_NOT_READY,
        "Multi-Attach error",
        event(
            POD, "FailedAttachVolume", 'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) tiny-9'
        ),
    ),
    "sandbox": (
        runtime(CREATING),
        Reason.PODS_STARTING,
        "no IP addresses available",
        event(POD, "FailedCreatePodSandBox", "plugin type=bridge failed: no IP addresses available"),
    ),
    "nobody has looked": ({}, Reason.PODS_STARTING, "starts"),
}

REJECTIONS: dict[Reason, str] = {
    Reason.QUOTA_EXCEEDED: (
        'pods "tiny-ab12-x7k2p" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, '
        "used: requests.nvidia.com/gpu=4, limited: requests.nvidia.com/gpu=4"
    ),
    Reason.POD_REJECTED: ('pods "tiny-ab12-x7k2p" is forbidden: violates PodSecurity "restricted:latest": hostNetwork'),
    Reason.TEMPLATE_INVALID: 'Pod "tiny-ab12-x7k2p" is invalid: spec.containers[0].image: Required value',
    Reason.CONFIG_ERROR: (
        'pods "tiny-ab12-x7k2p" is forbidden: service account shop/tiny: serviceaccount "tiny" not found'
    ),
}
