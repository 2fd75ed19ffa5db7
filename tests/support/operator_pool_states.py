"""States of a pool's pods, its model, its rollouts and its autoscaler, and the status that each leads to."""

from __future__ import annotations

import dataclasses

import msgspec
from treeline_operator.world import PoolRouting, Scaling

from support.operator_status import LATER, pod, pool, ready, revision, view, world
from support.operator_trouble import POD, RUNNING, init

TWO = {"replicas": 2}
PICKER = {"type": "Picker", "minReplicas": 0, "maxReplicas": 4}


def pods_of(mine, count, **last):
    """Return ``count`` ready pods, and one more in the given state."""
    there = [pod(mine, f"tiny-{n}", **ready(n)) for n in range(2, count + 2)]
    return (*there, pod(mine, POD, **last))


def old(mine, count=1, **more):
    return tuple(pod(mine, f"old-{n}", revision="before", **{**ready(90 + n), **more}) for n in range(count))


def scaled(autoscaling, *children, **changes):
    mine = pool(autoscaling=autoscaling)
    return world(mine, children=(revision(mine, 1, 1), *children), **changes)


def audited(*off):
    mine = pool()
    listed = view(mine, "tiny-1")
    (one,) = listed.pools["tiny"]
    return world(
        mine, picker=dataclasses.replace(listed, pools={"tiny": (msgspec.structs.replace(one, cache_sources_off=off),)})
    )


def said(kind, status, reason="X", message=""):
    return {"type": kind, "status": status, "reason": reason, "message": message}


def troubled(status, events=(), count=1, spec=TWO):
    mine = pool(**spec)
    there = pods_of(mine, count, **status)
    serving = [one.ref.name for one in there[:-1]]
    return world(
        mine,
        children=(revision(mine, count + 1, count),),
        pods=there,
        events=tuple(events),
        picker=view(mine, *serving),
    )


def rolling(spec=None, *, target_ready=0, replicas=1, conditions=(), pods=None, **changes):
    mine = pool(**(spec or {}))
    fresh = [pod(mine, f"tiny-{n}", **(ready(n) if n <= target_ready else {})) for n in range(1, replicas + 1)]
    there = tuple(fresh) if pods is None else tuple(pods)
    return world(
        mine,
        children=(revision(mine, replicas, target_ready, conditions=conditions),),
        pods=(*there, *old(mine)),
        picker=view(mine, *(f"tiny-{n}" for n in range(1, target_ready + 1)), "old-0"),
        **changes,
    )


def routed(mine, way, reason="", message="it is away"):
    """Return a serving pool with a picker that reports its routing."""
    seen = world(mine)
    picker = dataclasses.replace(seen.picker, routing={mine.name: PoolRouting(way, reason, message)})
    return dataclasses.replace(seen, picker=picker)


OVERDUE = [said("Progressing", "False", "ProgressDeadlineExceeded")]
BROKEN = pool(template={"containers": []})
ZERO = pool(replicas=0)
PROGRESS = {POD: (3 << 30, 4 << 30)}

# name: (world, condition with its status and reason, part of the message)
POOL_STATES = {
    "serves": (world(), "Ready True Serving", "tiny is served by 1 pod at http://treeline-gateway.shop.svc"),
    "all is settled": (world(), "Progressing False RolloutComplete", "1 of 1 pods are ready"),
    "pods": (world(), "WorkloadsReady True PodsReady", "1 of 1"),
    "model": (world(), "ModelReady True ModelLoaded", "1 pod has loaded the model tiny"),
    "model, twice": (world(pool(**TWO)), "ModelReady True ModelLoaded", "2 pods have loaded"),
    "no keys yet": (
        world(children=(), pods=(), gateway_parts=()),
        "WorkloadsReady False KeysPending",
        "once gateway treeline has its keys",
    ),
    "no groups": (
        world(pool(accelerator={"type": "nvidia", "nodes": 2}), children=(), pods=()),
        "WorkloadsReady False LeaderWorkerSetMissing",
        "the cluster does not have leaderworkerset.x-k8s.io/v1/LeaderWorkerSet",
    ),
    "no keys needed": (
        world(pool(engine={"type": "custom", "image": "x"}), children=(), pods=(), gateway_parts=()),
        "WorkloadsReady False Pending",
        "is not there yet",
    ),
    "nothing there": (world(children=(), pods=()), "WorkloadsReady False Pending", "is not there yet"),
    "no pods yet": (world(pods=()), "WorkloadsReady False PodsStarting", "0 of 1 pods are ready"),
    "no pods, no model": (world(pods=()), "ModelReady Unknown PodsStarting", "builtin://tiny"),
    "zero": (
        world(ZERO, pods=()),
        "Ready False ScaledToZero",
        "replicas is 0: requests for the model get 503",
    ),
    "zero, pods": (world(ZERO, pods=()), "WorkloadsReady True ScaledToZero", "no pods are wanted"),
    "zero, model": (world(ZERO, pods=()), "ModelReady Unknown ScaledToZero", "no pod loads"),
    "zero, settled": (world(ZERO, pods=()), "Progressing False ScaledToZero", "no pods"),
    "deleted": (
        world(pool().model_copy(update={"metadata": pool().metadata.model_copy(update={"deletion_timestamp": LATER})})),
        "Ready False Deleting",
        "is being deleted",
    ),
    "rolling": (
        rolling(),
        "WorkloadsReady False PodsStarting",
        "0 of 1 pods are ready; 1 of 1 pods (tiny-1): starts; meanwhile served by 1 pod of older revisions",
    ),
    "rolling, no new pod": (rolling(pods=()), "WorkloadsReady False RollingOut", "meanwhile served by 1 pod"),
    "rolling, progress": (rolling(), "Progressing True RollingOut", "left of older revisions: 1 pod"),
    "rolling, last": (rolling(target_ready=1), "Progressing True RollingOut", "left of older revisions: 1 pod"),
    "first start": (troubled({}), "Progressing True PodsStarting", "1 of 2 pods are ready"),
    "stalled": (rolling(conditions=OVERDUE), "Progressing False RolloutStalled", "0 of 1 pods are ready"),
    "paused": (
        rolling({"rollout": {"paused": True}}, pods=()),
        "Progressing False Paused",
        "kept of older revisions: 1 pod",
    ),
    "paused, pods": (rolling({"rollout": {"paused": True}}, pods=()), "Ready False Paused", "meanwhile"),
    "scaling up": (world(pool(replicas=3), pods=()), "Progressing True Scaling", "0 of 3 pods"),
    "scaling down": (
        world(pods=tuple(pod(pool(), f"tiny-{n}", **ready(n)) for n in (1, 2))),
        "Progressing True Scaling",
        "2 of 1 pods are ready",
    ),
    "draining": (
        world(pods=(pod(pool(), "tiny-1", **ready()), pod(pool(), "tiny-2", serving="false", **ready(2)))),
        "Progressing True Draining",
        "finishing their requests: 1 pod",
    ),
    "bad template": (
        world(BROKEN, children=(), pods=()),
        "Ready False TemplateInvalid",
        "containers is not part of a pod template",
    ),
    "other model": (
        world(picker=view(pool(), "tiny-1", models=("gpt2",))),
        "ModelReady False ModelNotServed",
        "the pods serve gpt2, not tiny",
    ),
    "download": (
        troubled(init(RUNNING), count=0, spec={}),
        "ModelReady False WeightsDownloading",
        "75 % of builtin://tiny are there, downloaded by 1 pod",
    ),
    "pickers unasked": (scaled(PICKER), "ScalingActive Unknown Pending", "no picker was asked"),
    "scaled by its pickers": (
        scaled(PICKER, scaling=Scaling(heard=True)),
        "ScalingActive True AutoscalerActive",
        "sets replicas between 0 and 4",
    ),
    "pickers that say nothing": (
        scaled(PICKER, scaling=Scaling()),
        "ScalingActive False SignalsMissing",
        "no picker of gateway treeline",
    ),
    "scaled by somebody else": (
        scaled(PICKER, scaling=Scaling(heard=True, owner="HorizontalPodAutoscaler theirs")),
        "ScalingActive False ScaledByAnother",
        "HorizontalPodAutoscaler theirs scales the pool",
    ),
    "caches that are right": (world(), "CachesTrusted True CachesInUse", "used by 1 pod"),
    "a cache that an audit found wrong": (
        audited("disk", "peer"),
        "CachesTrusted False CacheWrong",
        "not used any more, an audit found wrong pages: pod tiny-1 (disk, peer)",
    ),
    "claim for one node": (
        world(pool(replicas=2, engine={"cache": {"size": "10Gi"}})),
        "Warnings True ClaimNotShareable",
        "claim tiny-cache is ReadWriteOnce: all 2 pods must be on one node",
    ),
    "claim for one node, autoscaled": (
        world(pool(engine={"cache": {"size": "10Gi"}}, autoscaling=PICKER)),
        "Warnings True ClaimNotShareable",
        "all 4 pods",
    ),
    "claim for one node, with pods that compute prompts": (
        world(
            pool(
                engine={"cache": {"size": "10Gi"}, "hostCache": "1Gi"},
                autoscaling=PICKER,
                prefill={"maxReplicas": 3},
            )
        ),
        "Warnings True ClaimNotShareable",
        "all 7 pods",
    ),
    "claim for one pod": (
        world(pool(engine={"cache": {"size": "10Gi", "accessModes": ["ReadWriteOncePod"]}})),
        "Warnings True ClaimNotShareable",
        "one pod at a time can have it, also while a rollout",
    ),
    "devices without work": (
        world(
            pool(
                model={"uri": "path:///m", "name": "tiny"},
                accelerator={"type": "nvidia", "count": 8},
                engine={"type": "vllm", "tensorParallel": 2},
            )
        ),
        "Warnings True DevicesUnused",
        "accelerator.count is 8, and 6 of them are unused",
    ),
    "a tokenizer that the picker cannot have": (
        world(pool(model={"uri": "path:///m", "name": "tiny"}, engine={"type": "vllm"})),
        "Warnings True RoutedByHistory",
        "the tokenizer of tiny is at path:///m, which is only in the runtime pods: requests are routed by history",
    ),
    "a picker that routes by history": (
        routed(pool(model={"uri": "hf://o/tiny"}, engine={"type": "vllm"}), "history", "TokenizerUnavailable"),
        "Warnings True RoutedByHistory",
        "the picker reports TokenizerUnavailable: it is away: requests are routed by history",
    ),
    "arguments that the picker cannot see": (
        world(
            pool(
                model={"uri": "hf://o/tiny"},
                engine={"type": "vllm", "args": ["--chat-template=/t.jinja", "--api-key", "--tokenizer-mode=slow"]},
            )
        ),
        "Warnings True ArgsUntold",
        "cannot see these flags in engine.args: --chat-template (model.chatTemplateRef sets both), --api-key (",
    ),
    "arguments that say what a field says": (
        world(
            pool(
                model={"uri": "hf://o/tiny"},
                engine={"type": "vllm", "contextLength": 512, "args": ["--max_model_len=9", "--data-parallel-size=1"]},
            )
        ),
        "Warnings True ArgsOverride",
        "engine.args set --max-model-len (engine.contextLength): the fields have no effect",
    ),
    "a template that says what it cannot change": (
        world(
            pool(
                template={
                    "spec": {
                        "terminationGracePeriodSeconds": 1,
                        "containers": [{"name": "runtime", "ports": [{"name": "http", "containerPort": 9000}]}],
                    }
                }
            )
        ),
        "Warnings True TemplateOverruled",
        "the operator's own values of spec.terminationGracePeriodSeconds, spec.containers[runtime].ports[9000,TCP]",
    ),
}
