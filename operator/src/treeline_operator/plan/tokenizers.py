"""Tokenizers for a gateway's picker, for engines that serve none: its flags, volumes and environment.

The picker keys prompts by text, and events of vLLM and SGLang contain tokens: without the tokenizer it routes by its
own past requests, not by the caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from treeline_operator.api.pool import InferencePool
from treeline_operator.api.source import Source
from treeline_operator.plan.download import CLAIMS, path
from treeline_operator.plan.engines import engine_of
from treeline_operator.plan.facts import DOWNLOAD
from treeline_operator.plan.objects import TEMPLATE_FILE, Object, mount, template_volume
from treeline_operator.plan.shared_gateway import SharedGateway

CACHE_DIR: Final = "/var/cache/treeline"
TEMPLATES_DIR: Final = "/etc/treeline/chat-templates"
_CACHE: Final = "tokenizers"
_CACHE_LIMIT: Final = "2Gi"
"""Twice the size that the picker's cache may reach."""
MIRROR: Final = "HF_ENDPOINT"


class HubWay(NamedTuple):
    """Access to the Hub: the Secret and key of a token, and the address of a mirror. They belong together: a token is
    sent only where its pool sends it."""

    token: tuple[str, str] | None = None
    mirror: str = ""


@dataclass(frozen=True, slots=True)
class Tokenizers:
    """Tokenizer settings of the picker's container; all empty if every engine serves its own.

    `sources` maps a model's name to a URI or a path in the picker's pod, `templates` to the ConfigMap and key of its
    chat template; `way` is the access to the Hub.
    """

    sources: Mapping[str, str]
    templates: Mapping[str, tuple[str, str]]
    claims: tuple[str, ...]
    way: HubWay

    @classmethod
    def of(cls, shared: SharedGateway) -> Tokenizers:
        """The settings for pools that share a gateway, without pools that are being deleted. If two pools have a model
        of one name, the oldest pool's settings count."""
        found: dict[str, str] = {}
        templates: dict[str, tuple[str, str]] = {}
        claims: set[str] = set()
        for pool, source in _readable(shared):
            name = pool.spec.model.served_name
            if name not in found:
                found[name] = _uri(pool) if source.scheme == "hf" else path(source)
                claims |= {source.root} if source.scheme == "pvc" else set()
                if (template := pool.spec.model.chat_template_ref) is not None:
                    templates[name] = template.name, template.key
        return cls(found, templates, tuple(sorted(claims)), _way(shared))

    @property
    def hub(self) -> bool:
        """Whether the picker downloads any of them from Hugging Face."""
        return any(uri.startswith("hf://") for uri in self.sources.values())

    @property
    def inputs(self) -> Object:
        """The settings as data, for the hash of the picker's inputs; empty without tokenizers."""
        found = {"sources": dict(self.sources), "templates": dict(self.templates), **self.way._asdict()}
        return {name: value for name, value in found.items() if value}

    @property
    def flags(self) -> list[str]:
        """The picker's flags."""
        flags = [f"--tokenizer={model}={uri}" for model, uri in sorted(self.sources.items())]
        for number, model in enumerate(sorted(self.templates)):
            flags.append(f"--chat-template={model}={TEMPLATES_DIR}/{number}/{TEMPLATE_FILE}")
        return [*flags, f"--tokenizer-cache={CACHE_DIR}"] if self.hub else flags

    @property
    def env(self) -> list[Object]:
        """The picker's environment: what the Hub's library reads."""
        if not self.hub:
            return []
        env: list[Object] = [
            {"name": "HF_HOME", "value": "/tmp/hf"},
            {"name": "HF_HUB_DISABLE_TELEMETRY", "value": "1"},
        ]
        if self.way.token is not None:
            secret, key = self.way.token
            # Without the Secret the pool's own downloads report the failure; the picker also serves other pools.
            reference = {"name": secret, "key": key, "optional": True}
            env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
        return [*env, {"name": MIRROR, "value": self.way.mirror}] if self.way.mirror else env

    @property
    def volumes(self) -> list[Object]:
        """Volumes: claims (read-only), templates, and the picker's download cache."""
        found: list[Object] = [
            {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
            for number, claim in enumerate(self.claims)
        ]
        for number, model in enumerate(sorted(self.templates)):
            # Without the ConfigMap the pool's own pods report the failure; the picker also serves other pools.
            found.append(template_volume(f"template-{number}", *self.templates[model], optional=True))
        return [*found, {"name": _CACHE, "emptyDir": {"sizeLimit": _CACHE_LIMIT}}] if self.hub else found

    @property
    def mounts(self) -> list[Object]:
        """The mounts of these volumes."""
        found = [mount(f"claim-{number}", f"{CLAIMS}/{claim}") for number, claim in enumerate(self.claims)]
        found += [mount(f"template-{number}", f"{TEMPLATES_DIR}/{number}") for number in range(len(self.templates))]
        return [*found, mount(_CACHE, CACHE_DIR, read_only=False)] if self.hub else found


def by_history(pool: InferencePool) -> str:
    """Why the picker cannot use the events of a pool's engines: it has no tokenizer for them. Empty if it can, if the
    engine serves one, or if none is needed."""
    source = _source(pool)
    if source is None or not pool.spec.endpoint_picker.heeds_caches or not engine_of(pool).publishes:
        return ""
    return _refusal(pool, source)


def not_held(pool: InferencePool, shared: SharedGateway) -> str:
    """The Secret or mirror of a pool that the picker does not use, because another pool's is in use; empty if none."""
    source = _source(pool)
    if source is None or source.scheme != "hf" or pool.deleting:
        return ""
    if _mirror(pool) is None:
        return (
            f"the picker uses neither token nor {MIRROR} of the pool: the container {DOWNLOAD} has no plain value of it"
        )
    asked, held = _hub_way(pool), _way(shared)
    if asked in (HubWay(), held):
        return ""
    return f"the picker downloads tokenizers {_words(held)}, as an older pool says, and not {_words(asked)}"


def _words(way: HubWay) -> str:
    token = "without a token" if way.token is None else f"with Secret {way.token[0]} (key {way.token[1]})"
    return f"{token} from {way.mirror or 'Hugging Face'}"


def _uri(pool: InferencePool) -> str:
    return pool.spec.model.tokenizer or pool.spec.model.uri


def _source(pool: InferencePool) -> Source | None:
    """The tokenizer's source of a pool's model; None if its engine serves it."""
    return None if engine_of(pool).serves_tokenizer else Source.parse(_uri(pool))


def _refusal(pool: InferencePool, source: Source) -> str:
    """Why the picker cannot have a tokenizer from there; empty where it can."""
    name = pool.spec.model.served_name
    if "=" in name or "://" in name:
        return f"the picker cannot take the model name {name}: use a simpler model.name"
    if source.scheme == "hf":
        return ""
    if source.scheme == "pvc":
        why = f"the tokenizer of {name} is on claim {source.root}, which the picker does not mount"
        return "" if pool.spec.model.picker_reads_claim else why
    return f"the tokenizer of {name} is at {_uri(pool)}, which is only in the runtime pods"


def _readable(shared: SharedGateway) -> Iterator[tuple[InferencePool, Source]]:
    """The pools whose tokenizer the picker gets from the model's source, the oldest first."""
    for pool in shared.members:
        blind = pool.deleting or not pool.spec.endpoint_picker.heeds_caches
        source = None if blind else _source(pool)
        if source is not None and not _refusal(pool, source):
            yield pool, source


def _way(shared: SharedGateway) -> HubWay:
    """The Hub access of the oldest pool that names a token or a mirror."""
    ways = (_hub_way(pool) for pool, source in _readable(shared) if source.scheme == "hf")
    return next((way for way in ways if way != HubWay()), HubWay())


def _hub_way(pool: InferencePool) -> HubWay:
    reference, mirror = pool.spec.model.token_secret_ref, _mirror(pool)
    if mirror is None:
        return HubWay()  # the token's destination is unknown, so the picker does not use it
    return HubWay(None if reference is None else (reference.name, reference.key), mirror)


def _mirror(pool: InferencePool) -> str | None:
    """The mirror that the fragment of the pool's download container sets; empty without one, None if its value is
    elsewhere (in a ConfigMap, a Secret)."""
    spec: Any = (pool.spec.template or {}).get("spec")
    entry = _named(_named(spec, "initContainers", DOWNLOAD), "env", MIRROR)
    value = entry.get("value", "" if not entry else None)
    return value if isinstance(value, str) else None


def _named(parent: Any, field: str, name: str) -> Mapping[str, Any]:
    """The item of a list by its name; the fragment may have any shape."""
    items = parent.get(field) if isinstance(parent, Mapping) else None
    listed = items if isinstance(items, list) else ()
    return next((item for item in listed if isinstance(item, Mapping) and item.get("name") == name), {})
