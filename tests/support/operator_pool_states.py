"""States of a pool's pods, its model, its rollouts and its autoscaler, and what each is called in the status."""

from __future__ import annotations

import dataclasses

from treeline_operator.api.conditions import ConditionType, Reason
from treeline_operator.world import PoolRouting, Scaling

from support.operator_status import LATER, pod, pool, ready, revision, view, world
from support.operator_trouble import POD, RUNNING, init

T = ConditionType

TWO = {"replicas": 2}
PICKER = {"type": "Picker", "minReplicas": 0, "maxReplicas": 4}


def pods_of(mine, count, **last):
    """So many ready pods, and one more in the given state."""
    there = [pod(mine, f"tiny-{n}", **ready(n)) for n in range(2, count + 2)]
    return (*there, pod(mine, POD, **last))


def old(mine, count=1, **more):
    return tuple(pod(mine, f"old-{n}", revision="before", **{**ready(90 + n), **more}) for n in range(count))


def scaled(autoscaling, *children, **changes):
    mine = pool(autoscaling=autoscaling)
    return world(mine, children=(revision(mine, 1, 1), *children), **changes)


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
    """A pool that serves, with a picker that says how it is routed."""
    seen = world(mine)
    picker = dataclasses.replace(seen.picker, routing={mine.name: PoolRouting(way, reason, message)})
    return dataclasses.replace(seen, picker=picker)


OVERDUE = [said("Progressing", "False", "ProgressDeadlineExceeded")]
BROKEN = pool(template={"containers": []})
ZERO = pool(replicas=0)
PROGRESS = {POD: (3 << 30, 4 << 30)}

# name: (world, condition, status, reason, part of the message)
POOL_STATES = {
    "serves": (
        world(),
        T.READY,
        "True",
        Reason.SERVING,
        "tiny is served by 1 pod at http://treeline-gateway.shop.svc",
    ),
    "all is settled": (world(), T.PROGRESSING, "False", Reason.ROLLOUT_COMPLETE, "1 of 1 pods are ready"),
    "pods": (world(), T.WORKLOADS_READY, "True", Reason.PODS_READY, "1 of 1"),
    "model": (world(), T.MODEL_READY, "True", Reason.MODEL_LOADED, "1 pod has loaded the model tiny"),
    "model, twice": (world(pool(**TWO)), T.MODEL_READY, "True", Reason.MODEL_LOADED, "2 pods have loaded"),
    "no keys yet": (
        world(children=(), pods=(), gateway_parts=()),
        T.WORKLOADS_READY,
        "False",
        Reason.KEYS_PENDING,
        "as soon as gateway treeline has its keys",
    ),
    "no keys needed": (
        world(pool(engine={"type": "custom", "image": "x"}), children=(), pods=(), gateway_parts=()),
        T.WORKLOADS_READY,
        "False",
        Reason.PENDING,
        "is not there yet",
    ),
    "nothing there": (
        world(children=(), pods=()),
        T.WORKLOADS_READY,
        "False",
        Reason.PENDING,
        "is not there yet",
    ),
    "no pods yet": (
        world(pods=()),
        T.WORKLOADS_READY,
        "False",
        Reason.PODS_STARTING,
        "0 of 1 pods are ready",
    ),
    "no pods, no model": (world(pods=()), T.MODEL_READY, "Unknown", Reason.PODS_STARTING, "builtin://tiny"),
    "zero": (
        world(ZERO, pods=()),
        T.READY,
        "False",
        Reason.SCALED_TO_ZERO,
        "replicas is 0: requests for the model are answered 503",
    ),
    "zero, pods": (
        world(ZERO, pods=()),
        T.WORKLOADS_READY,
        "True",
        Reason.SCALED_TO_ZERO,
        "no pods are asked for",
    ),
    "zero, model": (world(ZERO, pods=()), T.MODEL_READY, "Unknown", Reason.SCALED_TO_ZERO, "no pod loads"),
    "zero, settled": (world(ZERO, pods=()), T.PROGRESSING, "False", Reason.SCALED_TO_ZERO, "no pods"),
    "deleted": (
        world(pool().model_copy(update={"metadata": pool().metadata.model_copy(update={"deletion_timestamp": LATER})})),
        T.READY,
        "False",
        Reason.DELETING,
        "is being deleted",
    ),
    "rolling": (
        rolling(),
        T.WORKLOADS_READY,
        "False",
        Reason.PODS_STARTING,
        "0 of 1 pods are ready; 1 of 1 pods (tiny-1): starts; meanwhile served by 1 pod of older revisions",
    ),
    "rolling, no new pod": (
        rolling(pods=()),
        T.WORKLOADS_READY,
        "False",
        Reason.ROLLING_OUT,
        "meanwhile served by 1 pod",
    ),
    "rolling, progress": (
        rolling(),
        T.PROGRESSING,
        "True",
        Reason.ROLLING_OUT,
        "left of older revisions: 1 pod",
    ),
    "rolling, last": (
        rolling(target_ready=1),
        T.PROGRESSING,
        "True",
        Reason.ROLLING_OUT,
        "left of older revisions: 1 pod",
    ),
    "first start": (troubled({}), T.PROGRESSING, "True", Reason.PODS_STARTING, "1 of 2 pods are ready"),
    "stalled": (
        rolling(conditions=OVERDUE),
        T.PROGRESSING,
        "False",
        Reason.ROLLOUT_STALLED,
        "0 of 1 pods are ready",
    ),
    "paused": (
        rolling({"rollout": {"paused": True}}, pods=()),
        T.PROGRESSING,
        "False",
        Reason.PAUSED,
        "kept of older revisions: 1 pod",
    ),
    "paused, pods": (
        rolling({"rollout": {"paused": True}}, pods=()),
        T.READY,
        "False",
        Reason.PAUSED,
        "meanwhile",
    ),
    "scaling up": (world(pool(replicas=3), pods=()), T.PROGRESSING, "True", Reason.SCALING, "0 of 3 pods"),
    "scaling down": (
        world(pods=tuple(pod(pool(), f"tiny-{n}", **ready(n)) for n in (1, 2))),
        T.PROGRESSING,
        "True",
        Reason.SCALING,
        "2 of 1 pods are ready",
    ),
    "draining": (
        world(pods=(pod(pool(), "tiny-1", **ready()), pod(pool(), "tiny-2", serving="false", **ready(2)))),
        T.PROGRESSING,
        "True",
        Reason.DRAINING,
        "finishing their requests: 1 pod",
    ),
    "bad template": (
        world(BROKEN, children=(), pods=()),
        T.READY,
        "False",
        Reason.TEMPLATE_INVALID,
        "containers is not part of a pod template",
    ),
    "other model": (
        world(picker=view(pool(), "tiny-1", models=("gpt2",))),
        T.MODEL_READY,
        "False",
        Reason.MODEL_NOT_SERVED,
        "the pods serve gpt2, not tiny",
    ),
    "download": (
        troubled(init(RUNNING), count=0, spec={}),
        T.MODEL_READY,
        "False",
        Reason.WEIGHTS_DOWNLOADING,
        "75 % of builtin://tiny are there, downloaded by 1 pod",
    ),
    "pickers unasked": (scaled(PICKER), T.SCALING_ACTIVE, "Unknown", Reason.PENDING, "not been asked"),
    "scaled by its pickers": (
        scaled(PICKER, scaling=Scaling(heard=True)),
        T.SCALING_ACTIVE,
        "True",
        Reason.AUTOSCALER_ACTIVE,
        "sets replicas between 0 and 4",
    ),
    "pickers that say nothing": (
        scaled(PICKER, scaling=Scaling()),
        T.SCALING_ACTIVE,
        "False",
        Reason.SIGNALS_MISSING,
        "no picker of gateway treeline",
    ),
    "scaled by somebody else": (
        scaled(PICKER, scaling=Scaling(heard=True, owner="HorizontalPodAutoscaler theirs")),
        T.SCALING_ACTIVE,
        "False",
        Reason.SCALED_BY_ANOTHER,
        "HorizontalPodAutoscaler theirs scales the pool",
    ),
    "claim for one node": (
        world(pool(replicas=2, engine={"cache": {"size": "10Gi"}})),
        T.WARNINGS,
        "True",
        Reason.CLAIM_NOT_SHAREABLE,
        "claim tiny-cache is ReadWriteOnce: all 2 pods must be on one node",
    ),
    "claim for one node, autoscaled": (
        world(pool(engine={"cache": {"size": "10Gi"}}, autoscaling=PICKER)),
        T.WARNINGS,
        "True",
        Reason.CLAIM_NOT_SHAREABLE,
        "all 4 pods",
    ),
    "claim for one pod": (
        world(pool(engine={"cache": {"size": "10Gi", "accessModes": ["ReadWriteOncePod"]}})),
        T.WARNINGS,
        "True",
        Reason.CLAIM_NOT_SHAREABLE,
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
        T.WARNINGS,
        "True",
        Reason.DEVICES_UNUSED,
        "accelerator.count is 8, and the engine uses 6 fewer",
    ),
    "a tokenizer that the picker cannot have": (
        world(pool(model={"uri": "path:///m", "name": "tiny"}, engine={"type": "vllm"})),
        T.WARNINGS,
        "True",
        Reason.ROUTED_BY_HISTORY,
        "the tokenizer of tiny is at path:///m, which is in the runtime pods alone: requests are routed by history",
    ),
    "a picker that routes by history": (
        routed(pool(model={"uri": "hf://o/tiny"}, engine={"type": "vllm"}), "history", "TokenizerUnavailable"),
        T.WARNINGS,
        "True",
        Reason.ROUTED_BY_HISTORY,
        "the picker says TokenizerUnavailable: it is away: requests are routed by history",
    ),
    "arguments that the picker is not told": (
        world(
            pool(
                model={"uri": "hf://o/tiny"},
                engine={"type": "vllm", "args": ["--chat-template=/t.jinja", "--api-key", "--tokenizer-mode=slow"]},
            )
        ),
        T.WARNINGS,
        "True",
        Reason.ARGS_UNTOLD,
        "engine.args says by --chat-template (model.chatTemplateRef is told to both), --api-key (",
    ),
    "arguments that say what a field says": (
        world(
            pool(
                model={"uri": "hf://o/tiny"},
                engine={"type": "vllm", "contextLength": 512, "args": ["--max_model_len=9", "--data-parallel-size=1"]},
            )
        ),
        T.WARNINGS,
        "True",
        Reason.ARGS_OVERRIDE,
        "engine.args say --max-model-len (engine.contextLength): the fields have no effect",
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
        T.WARNINGS,
        "True",
        Reason.TEMPLATE_OVERRULED,
        "keeps its own for spec.terminationGracePeriodSeconds, spec.containers[runtime].ports[9000,TCP]",
    ),
}
