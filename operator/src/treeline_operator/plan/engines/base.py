"""What an engine is to the operator: a container, apart from what the containers of all engines have in common."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pydantic.alias_generators import to_camel
from treeline_wire import labels
from treeline_wire import ports as wire

from treeline_operator.api.engine import EngineType
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.download import Files
from treeline_operator.plan.objects import TEMPLATE_FILE, Object, http_get, probe
from treeline_operator.plan.provision import gib
from treeline_operator.world import Images

BUILTIN_START_S: Final = 120
DEFAULT_START_S: Final = 1800
"""Loading, and on GPUs compiling kernels and capturing graphs, which takes minutes whatever the model's size."""
START_S_PER_GIB: Final = 20
"""A network disk at 50 MiB/s; the download has its own container and does not count."""
TEMPLATE_DIR: Final = "/etc/treeline/chat-template"
HUNG_GRACE_S: Final = 15
"""What hangs is killed soon: it has no streams left to finish, and its restart is waited for."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What an engine's container is, apart from what all have in common.

    `drains` tells whether the engine finishes its requests when it is asked to stop.
    """

    image: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    ports: tuple[tuple[str, int], ...]
    probes: dict[str, dict[str, Any]]
    drains: bool = True
    caches: tuple[tuple[str, str], ...] = ()
    """Environment → folder in the cache volume, beside those that every engine has."""
    keys: bool = False
    """Whether it reads the key pair that its KV sockets are secured with."""
    admin_key: str = ""
    """Environment in which it is handed the key to its administration; empty where it takes none."""
    annotations: tuple[tuple[str, str], ...] = ()
    """What the picker must know of the pod and cannot ask the engine."""
    shared_memory: bool = True
    fixed_user: bool = True
    """Whether the image runs as any user that we name."""
    downloads: bool = False
    """Whether the image can download models, too."""


class EngineAdapter(Protocol):
    """One type of engine. Adapters have no state: one serves all pools of its type.

    `flags` maps a setting of `spec.engine` to the engine's flag; one that is not there has no meaning for the engine.
    `hits_by_flag`: its command line says whether answers tell how much of a prompt was cached; otherwise the edge says
    it, request by request, or nobody. `serves_tokenizer`: the picker gets its tokenizer from the engine itself.
    `publishes`: it is started so that it publishes what its cache holds. `untold` are flags of which the picker would
    have to know, but is not told where they stand in `engine.args`, each with what to write instead.
    """

    name: EngineType
    flags: Mapping[str, str]
    hits_by_flag: bool
    serves_tokenizer: bool
    publishes: bool
    untold: Mapping[str, str]

    def metrics_port(self, pool: InferencePool) -> int | None:
        """The port that serves metrics and nothing else; None for engines that serve them on their API's."""
        ...

    def launch(self, pool: InferencePool, files: Files, images: Images) -> Launch:
        """How the pool's engine is started. `images` are used where the pool names none."""
        ...


def start_seconds(pool: InferencePool) -> int:
    """How long a start may take once the weights are on disk. A size that is known can only make it longer."""
    model = pool.spec.model
    least = BUILTIN_START_S if model.source.scheme == "builtin" else DEFAULT_START_S
    return max(least, math.ceil(gib(model.size) * START_S_PER_GIB))


def tells_hits(pool: InferencePool) -> bool:
    """Whether answers may say how much of the prompt was cached: not to strangers who share a cache."""
    gateway = pool.spec.gateway
    strangers = gateway.has_clients and not gateway.kept_apart and not gateway.edge.expose_routing
    return not strangers


def settings(pool: InferencePool, flags: Mapping[str, str]) -> list[str]:
    """The flags of all settings that differ from the engine's own defaults."""
    engine = pool.spec.engine
    args = []
    for setting, flag in flags.items():
        value = pool.spec.tensor_parallel if setting == "tensor_parallel" else getattr(engine, setting)
        parallel = setting in ("tensor_parallel", "data_parallel")
        if value is not None and not (parallel and value == 1):
            args.append(f"{flag}={value:g}" if isinstance(value, float) else f"{flag}={value}")
    return args


def traces(pool: InferencePool, *more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """The environment of an engine that goes by OpenTelemetry's variables; empty where nothing is traced."""
    return () if pool.spec.tracing is None else (*pool.spec.tracing.environment, *more)


def overridden(pool: InferencePool, flags: Mapping[str, str]) -> str:
    """The settings that `engine.args` say again: they come last, and hold. Empty if there are none."""
    engine = pool.spec.engine
    given = {arg.partition("=")[0].replace("_", "-") for arg in engine.args}
    found = [
        f"{flag} (engine.{to_camel(setting)})"
        for setting, flag in flags.items()
        if flag in given and getattr(engine, setting) != type(engine).model_fields[setting].default
    ]
    return f"engine.args say {', '.join(found)}: the fields have no effect" if found else ""


def untold(flags: Mapping[str, str], args: Iterable[str]) -> str:
    """What the picker is not told of a pool's own arguments, and what to write instead; empty if there is nothing."""
    given = {arg.partition("=")[0] for arg in args}
    found = [f"{flag} ({instead})" for flag, instead in flags.items() if flag in given]
    return f"the picker is not told of what engine.args says by {', '.join(found)}" if found else ""


def chat_template(pool: InferencePool) -> list[str]:
    """The flag of SGLang and vLLM for a template that is not the model's own."""
    return ["--chat-template", f"{TEMPLATE_DIR}/{TEMPLATE_FILE}"] if pool.spec.model.chat_template_ref else []


def kv_events() -> dict[str, object]:
    """`--kv-events-config` of SGLang and vLLM. Their ranks count up from these ports, and publish under no topic: a
    socket belongs to one engine."""
    return {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{wire.EVENTS}",
        "replay_endpoint": f"tcp://*:{wire.REPLAY}",
        "topic": "",
    }


def kv_annotations(pool: InferencePool) -> tuple[tuple[str, str], ...]:
    """The same for a picker that the engine does not tell."""
    return (
        (labels.KV_EVENTS_PORT, str(wire.EVENTS)),
        (labels.KV_REPLAY_PORT, str(wire.REPLAY)),
        (labels.DATA_PARALLEL_SIZE, str(pool.spec.engine.data_parallel)),
    )


def kv_ports(pool: InferencePool, *more: tuple[str, int]) -> Iterator[tuple[str, int]]:
    """The API's port, and those of events and replay (and `more`) of every data-parallel rank: `kv-events`, then
    `kv-events-1` and so on."""
    yield "http", pool.spec.engine.port
    for name, first in (("kv-events", wire.EVENTS), ("kv-replay", wire.REPLAY), *more):
        for rank in range(pool.spec.engine.data_parallel):
            yield f"{name}-{rank}" if rank else name, first + rank


def http(path: str) -> Object:
    """A probe's question on the API's port."""
    return http_get(path, "http")


def probes(
    pool: InferencePool, ready: Object, live: Object, *, period: int, live_period: int = 10, live_timeout: int = 10
) -> dict[str, Object]:
    """The three probes of an engine's container: `period` is that of the first two."""
    tries = math.ceil(start_seconds(pool) / period)
    hung = {"terminationGracePeriodSeconds": HUNG_GRACE_S}
    return {
        "startupProbe": probe(ready, period, tries, timeout_s=5) | hung,
        "readinessProbe": probe(ready, period, 2, timeout_s=5),
        "livenessProbe": probe(live, live_period, 6, timeout_s=live_timeout) | hung,
    }


def compact(value: object) -> str:
    """JSON as one word of a command line."""
    return json.dumps(value, separators=(",", ":"))
