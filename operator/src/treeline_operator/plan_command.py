"""`treeline operate plan`: what the operator would make of files, as YAML with the reasons; no cluster is asked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO

import yaml
from pydantic import ValidationError
from treeline_kube.yaml_depth import check_depth
from treeline_wire.command_line import Parser
from treeline_wire.settings import add_flags, values

from treeline_operator.actions import Apply, CreateKeys, Plan
from treeline_operator.api.conditions import Reason
from treeline_operator.api.model import InferenceModel
from treeline_operator.api.parts import API_VERSION, GROUP, Resource, explain
from treeline_operator.api.pool import InferencePool
from treeline_operator.api.rules import violations
from treeline_operator.controller.observe import Observer
from treeline_operator.controller.store import MODEL, POOL, Store
from treeline_operator.plan.gateway import plan_gateway
from treeline_operator.plan.gateway import template_problem as gateway_problem
from treeline_operator.plan.pool import plan_pool
from treeline_operator.plan.presets import PresetProblem, resolved
from treeline_operator.plan.runtime import template_problem
from treeline_operator.status.conditions import with_fix
from treeline_operator.status.models import model_statuses
from treeline_operator.status.pool import cautions
from treeline_operator.world import Images, Key, Platform, Ref

Object = dict[str, Any]

_OURS: Final[dict[str, type[Resource]]] = {POOL: InferencePool, MODEL: InferenceModel}
_ROUNDS: Final = 20
_MADE_UP: Final = "uid-of-"
_EXAMPLES: Final = """\
examples:
  treeline operate plan -f pool.yaml                      everything that a new pool leads to
  treeline operate plan -f pool.yaml | kubectl diff -f -  what an edited pool would change

The status is 0 if the files are sound, 2 if they are not.
"""


class BadInput(Exception):
    """A file cannot be used; the message says which, where and why."""


def parser() -> argparse.ArgumentParser:
    """The flags of the subcommand."""
    p = Parser(
        prog="treeline operate plan",
        description="Show what the operator would make of InferencePools and InferenceModels, and warnings.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "-f",
        "--filename",
        action="append",
        required=True,
        metavar="FILE",
        help="YAML or JSON with InferencePools and InferenceModels (others are passed over); - is standard input; may "
        "be repeated",
    )
    p.add_argument("--namespace", default="default", metavar="NS", help="of objects that name none (%(default)s)")
    p.add_argument(
        "--api",
        action="append",
        default=[],
        metavar="GROUP/VERSION/KIND",
        help="an optional API that the cluster has, such as gateway.networking.k8s.io/v1/HTTPRoute; may be repeated",
    )
    add_flags(p, Platform)
    add_flags(p.add_argument_group("images, where a pool names none"), Images)
    return p


def main(argv: Sequence[str], out: TextIO | None = None, now: datetime | None = None) -> int:
    """Run the subcommand; the exit status."""
    given = parser().parse_args(argv)
    images = Images(**values(Images, given))
    platform = Platform(images=images, apis=frozenset(given.api), **values(Platform, given))
    try:
        planning = Planning(platform, now or datetime.now(UTC))
        planning.load(given.filename, given.namespace)
        planning.run()
    except BadInput as exc:
        print(f"treeline operate plan: {exc}", file=sys.stderr)  # noqa: T201
        return 2
    for line in planning.text():
        print(line, file=out or sys.stdout)
    return 0


@dataclass(slots=True)
class Planning:
    """A cluster in memory that has nothing but what is in the files, and takes what is planned for them."""

    platform: Platform
    now: datetime
    made: dict[Ref, Apply | CreateKeys] = field(default_factory=dict)
    notes: dict[Key, tuple[str, ...]] = field(default_factory=dict)
    _store: Store = field(default_factory=Store)
    _version: int = 0

    @property
    def observer(self) -> Observer:
        """What is there now."""
        return Observer(self._store, self.platform)

    def load(self, files: Sequence[str], namespace: str) -> None:
        """Take in what the files have of ours. Raises `BadInput`."""
        asked = 0
        for name in files:
            for where, obj in _documents(name, _read(name)):
                if str(obj.get("apiVersion")).startswith(f"{GROUP}/"):
                    self._put(_checked(where, obj, namespace, self.platform))
                    asked += 1
                else:
                    about = f"# {where}: {obj.get('apiVersion')} {obj['kind']} is not ours and passed over"
                    print(about, file=sys.stderr)  # noqa: T201
        if not asked:
            raise BadInput(f"no InferencePool or InferenceModel in {', '.join(files)}")

    def run(self) -> None:
        """Plan and do until there is nothing to do. Raises `BadInput` for templates of pods that make no sense."""
        keys = sorted(self.observer.all_keys(), key=lambda key: (key.namespace, key.kind, key.name))
        for _ in range(_ROUNDS):
            plans = [(key, self._plan(key)) for key in keys if key.kind != "models"]
            self.notes = {key: plan.notes for key, plan in plans}
            for action in (action for _, plan in plans for action in plan.actions):
                assert isinstance(action, Apply | CreateKeys), "nothing is there to be taken away"
                self.made.setdefault(action.ref, action)
                if isinstance(action, Apply):
                    self._put(action.object)
            if not any(plan.actions for _, plan in plans):
                break
        for pool in self._pools():
            world = self.observer.pool_world(pool, self.now)
            if problem := gateway_problem(world.gateway) or template_problem(pool):
                raise BadInput(f"{Reason.TEMPLATE_INVALID}: {problem}")
        if any(plan.actions for _, plan in plans):
            raise RuntimeError("the plan does not come to an end; this is a defect")

    def text(self) -> Iterator[str]:
        """What would be made, each with the reason, and what somebody should know."""
        for ref, action in self.made.items():
            yield f"# {ref.kind} {ref.namespace}/{ref.name}: {action.why}"
            yield from ("---", yaml.safe_dump(_unowned(action.object), sort_keys=False).rstrip())
        told = {f"{key.kind} {key.namespace}/{key.name}": list(notes) for key, notes in self.notes.items()}
        for pool in self._pools():
            for reason, text in cautions(self.observer.pool_world(pool, self.now)):
                told[f"pool {pool.namespace}/{pool.name}"].append(f"warning {reason}: {with_fix(reason, text)}")
        yield from (f"# {about}: {note}" for about, notes in sorted(told.items()) for note in notes)
        observer = self.observer
        for namespace in sorted(self._store.namespaces_of(MODEL)):
            statuses = model_statuses(observer.models(namespace), observer.pools(namespace), self.now)
            for name, status in sorted(statuses.items()):
                said = status["conditions"][0]
                yield f"# model {namespace}/{name}: {said['reason']}: {said['message']}"

    def _pools(self) -> Iterator[InferencePool]:
        for ref, _ in sorted(self._store.pools()):
            if isinstance(pool := self.observer.pool(ref.namespace, ref.name), InferencePool):
                yield pool

    def _plan(self, key: Key) -> Plan:
        observer = self.observer
        if key.kind == "gateway":
            return plan_gateway(observer.gateway_world(key.namespace, key.name, self.now))
        pool = observer.pool(key.namespace, key.name)
        assert isinstance(pool, InferencePool), "it was checked when it was read"
        return plan_pool(observer.pool_world(pool, self.now))

    def _put(self, obj: Object) -> None:
        """As it would be in the cluster, with a uid that is made up where it has none."""
        self._version += 1
        made_up = {"uid": f"{_MADE_UP}{obj['kind']}-{obj['metadata']['name']}".lower(), "generation": 1}
        self._store.put({**obj, "metadata": {**made_up, **obj["metadata"], "resourceVersion": str(self._version)}})


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text()
    except OSError as exc:
        raise BadInput(f"{name}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise BadInput(f"{name}: no text ({exc.reason} at byte {exc.start})") from exc


def _documents(name: str, text: str) -> Iterator[tuple[str, Object]]:
    """The objects of a file, each with the place it is from; Lists are taken apart."""
    try:
        check_depth(text)
        documents = list(yaml.safe_load_all(text))
    except (yaml.YAMLError, ValueError) as exc:  # ValueError: a day that no calendar has
        raise BadInput(f"{name}: {exc}") from exc
    for number, document in enumerate(documents, start=1):
        where = f"{name}: document {number}" if len(documents) > 1 else name
        if document is None:
            continue
        if _kind(where, document).endswith("List") and isinstance(document.get("items"), list):
            for index, item in enumerate(document["items"]):
                _kind(f"{where}: items[{index}]", item)
                yield f"{where}: items[{index}]", item
        else:
            yield where, document


def _kind(where: str, document: Any) -> str:
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        raise BadInput(f"{where}: no Kubernetes object (it needs apiVersion, kind and metadata)")
    return str(document["kind"])


def _checked(where: str, obj: Object, namespace: str, platform: Platform) -> Object:
    """One of our objects, with a namespace, if the API server and the operator would take it."""
    kind, version = obj.get("kind", ""), obj.get("apiVersion")
    if kind not in _OURS or version != API_VERSION:
        ours = " and ".join(_OURS)
        raise BadInput(f"{where}: {version} {kind} is not ours; -f takes {ours} of {API_VERSION}")
    meta = obj.get("metadata")
    if isinstance(meta, dict):
        obj = {**obj, "metadata": {"namespace": namespace, **meta}}
    try:
        typed = _OURS[kind].from_object(obj, strict=True)
    except ValidationError as exc:
        raise BadInput(f"{where}: {explain(exc, _OURS[kind])}") from exc
    if isinstance(typed, InferencePool) and (problem := template_problem(typed)):
        raise BadInput(f"{where}: {Reason.TEMPLATE_INVALID}: spec.{problem}")
    if broken := list(violations(typed)):
        raise BadInput(f"{where}: {'; '.join(broken)}")
    try:
        if isinstance(typed, InferencePool):
            resolved(typed, platform.presets or {})
    except PresetProblem as exc:
        raise BadInput(f"{where}: {exc.reason}: {exc}") from exc
    return obj


def _unowned(obj: Object) -> Object:
    """The object for a cluster, in which an owner that is not there would be refused."""
    meta = {**obj["metadata"]}
    owners = [owner for owner in meta.pop("ownerReferences", ()) if not owner["uid"].startswith(_MADE_UP)]
    return {**obj, "metadata": meta | ({"ownerReferences": owners} if owners else {})}
