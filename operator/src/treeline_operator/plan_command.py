"""`treeline operate plan`: what the operator would do with files, as a diff, and why; without a cluster."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO

import yaml
from pydantic import ValidationError
from treeline_kube.yaml_depth import check_depth
from treeline_wire.command_line import Parser
from treeline_wire.settings import add_flags, values

from treeline_operator.actions import Apply
from treeline_operator.api.conditions import Reason
from treeline_operator.api.model import InferenceModel
from treeline_operator.api.parts import API_VERSION, GROUP, Resource, explain
from treeline_operator.api.pool import InferencePool
from treeline_operator.api.rules import violations
from treeline_operator.controller.kinds import EVERY
from treeline_operator.controller.store import MODEL, POOL
from treeline_operator.plan.facts import pod_template
from treeline_operator.plan.gateway import template_problem as gateway_problem
from treeline_operator.plan.presets import PresetProblem, resolved
from treeline_operator.plan.runtime import template_problem
from treeline_operator.pod_check import problems
from treeline_operator.simulation import SimulatedStep, Simulation
from treeline_operator.status.conditions import with_fix
from treeline_operator.status.models import model_statuses
from treeline_operator.status.pool import cautions
from treeline_operator.world import Images, Platform, Ref

Object = dict[str, Any]

_OURS: Final[dict[str, type[Resource]]] = {POOL: InferencePool, MODEL: InferenceModel}
_FOLLOWED: Final = frozenset(kind.resource.api for kind in EVERY)
"""Kinds that the operator follows; it leaves others alone."""
_NOISE: Final = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink")
_EXAMPLES: Final = """\
examples:
  treeline operate plan -f pool.yaml                      all objects of a new pool
  kubectl get tlpool,tlmodel,deploy,svc,cm,sa,role,rolebinding,pdb,netpol,pvc,pod -o yaml > now/all.yaml
  treeline operate plan -f pool.yaml --observed now       what an edited pool would change, and why
  treeline operate plan -f pool.yaml -o yaml | kubectl diff -f -

Kinds that the operator does not follow (Secrets, autoscalers) are ignored. The exit status is 0 if the files are valid,
2 otherwise.
"""


class BadInput(Exception):
    """A file is unusable; the message says which, where and why."""


def parser() -> argparse.ArgumentParser:
    """The flags of the subcommand."""
    p = Parser(
        prog="treeline operate plan",
        description="Show what the operator would create, change and delete for InferencePools and InferenceModels.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "-f",
        "--filename",
        action="append",
        required=True,
        metavar="FILE",
        help="YAML or JSON with InferencePools and InferenceModels (others are ignored); - is standard input; may "
        "be repeated",
    )
    p.add_argument(
        "--observed",
        type=Path,
        metavar="DIR",
        help="the present objects: files of `kubectl get … -o yaml`",
    )
    p.add_argument("-o", "--output", choices=("diff", "yaml"), default="diff", help="default: %(default)s")
    p.add_argument(
        "--explain", action="store_true", help="also show reasons, waiting or untouched objects, and warnings"
    )
    p.add_argument(
        "--namespace", default="default", metavar="NS", help="namespace of objects that name none (%(default)s)"
    )
    p.add_argument(
        "--api",
        action="append",
        default=[],
        metavar="GROUP/VERSION/KIND",
        help="an optional API that the cluster has, such as gateway.networking.k8s.io/v1/HTTPRoute; may be repeated",
    )
    add_flags(p, Platform)
    add_flags(p.add_argument_group("images for pools that name none"), Images)
    return p


def main(argv: Sequence[str], out: TextIO | None = None, now: datetime | None = None) -> int:
    """Run the subcommand; the exit status."""
    given = parser().parse_args(argv)
    out = out or sys.stdout
    images = Images(**values(Images, given))
    platform = Platform(images=images, apis=frozenset(given.api), **values(Platform, given))
    try:
        simulation = Simulation(platform, now or datetime.now(UTC))
        load(simulation, given.filename, given.observed, given.namespace)
        ended = simulation.run()
        check_pods(simulation)
    except BadInput as exc:
        print(f"treeline operate plan: {exc}", file=sys.stderr)  # noqa: T201
        return 2
    if not ended:
        print("treeline operate plan: the plan does not end; please report this bug", file=sys.stderr)  # noqa: T201
        return 1
    show = {"diff": _diffs, "yaml": _documents_of}[given.output]
    out.writelines(f"{line}\n" for line in show(simulation, given.explain))
    return 0


# ---- in -----------------------------------------------------------------------------------------------------------


def load(simulation: Simulation, files: Sequence[str], observed: Path | None, namespace: str) -> None:
    """Fill the simulation: the present state, then the desired objects. Raises `BadInput`."""
    if observed is not None:
        if not observed.is_dir():
            raise BadInput(f"--observed {observed} is not a directory")
        for path in sorted(path for path in observed.rglob("*") if path.suffix in (".yaml", ".yml", ".json")):
            for where, obj in _documents(str(path), _read(str(path))):
                _take_observed(simulation, where, obj)
        simulation.recall()
    asked = 0
    for name in files:
        for where, obj in _documents(name, _read(name)):
            if str(obj.get("apiVersion")).startswith(f"{GROUP}/"):
                _take_asked(simulation, where, obj, namespace)
                asked += 1
            else:
                print(f"# {where}: {obj.get('apiVersion')} {obj['kind']} is not ours, ignored", file=sys.stderr)  # noqa: T201
    if not asked:
        raise BadInput(f"no InferencePool or InferenceModel in {', '.join(files)}")


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
        raise BadInput(f"{where}: not a Kubernetes object (it needs apiVersion, kind and metadata)")
    return str(document["kind"])


def _take_observed(simulation: Simulation, where: str, obj: Object) -> None:
    try:
        if f"{obj['apiVersion']}/{obj['kind']}" in _FOLLOWED:
            simulation.put(obj)
    except (KeyError, TypeError, AttributeError) as exc:
        raise BadInput(f"{where}: no object of a cluster ({exc!r})") from exc


def _take_asked(simulation: Simulation, where: str, obj: Object, namespace: str) -> None:
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
            resolved(typed, simulation.platform.presets or {})
    except PresetProblem as exc:
        raise BadInput(f"{where}: {exc.reason}: {exc}") from exc
    known = simulation.get(typed.ref)
    if known is not None:
        there = {name: known["metadata"][name] for name in _NOISE if name in known["metadata"]}
        if known.get("spec") != obj["spec"]:
            there["generation"] = known["metadata"].get("generation", 1) + 1
        obj = {**obj, "metadata": {**obj["metadata"], **there}, "status": known.get("status", {})}
    simulation.put(obj)


def check_pods(simulation: Simulation) -> None:
    """Raises `BadInput` for pods that an API server would refuse."""
    for world in simulation.worlds():
        if problem := gateway_problem(world.gateway) or template_problem(world.pool):
            raise BadInput(f"{Reason.TEMPLATE_INVALID}: {problem}")
    for step in _final(simulation):
        ref = step.action.ref
        if step.after is not None and ref.kind in ("Deployment", "LeaderWorkerSet"):
            of = f"the pods of {ref.kind} {ref.namespace}/{ref.name}"
            if found := "; ".join(problems(dict(pod_template(step.after)))):
                raise BadInput(f"{Reason.TEMPLATE_INVALID}: {of} are invalid: {found}")


# ---- out ----------------------------------------------------------------------------------------------------------


def _final(simulation: Simulation) -> list[SimulatedStep]:
    """One step per object: from its first state to its last."""
    by_ref: dict[Ref, SimulatedStep] = {}
    for step in simulation.steps:
        first = by_ref.get(step.action.ref)
        by_ref[step.action.ref] = step if first is None else replace(step, before=first.before)
    return list(by_ref.values())


def _diffs(simulation: Simulation, explaining: bool) -> Iterator[str]:
    steps = _final(simulation)
    for step in steps:
        yield from _diff(step, explaining)
    if not steps:
        yield "# nothing to do: the cluster matches the files"
    if explaining:
        yield from _notes(simulation)
    if steps:
        counts = {verb: sum(step.verb == verb for step in steps) for verb in ("create", "change", "scale", "delete")}
        yield "# " + ", ".join(f"{count} to {verb}" for verb, count in counts.items() if count)


def _diff(step: SimulatedStep, explaining: bool) -> Iterator[str]:
    yield from _why(step, explaining)
    ref = step.action.ref
    yield from _lines(_clean(step.before), _clean(step.after), f"{ref.kind} {ref.namespace}/{ref.name}")


def _why(step: SimulatedStep, explaining: bool) -> Iterator[str]:
    ref = step.action.ref
    yield f"# {step.verb} {ref.kind} {ref.namespace}/{ref.name}: {step.action.why}"
    if explaining and isinstance(step.action, Apply) and step.action.drift:
        yield f"#   changed by hand: {', '.join(step.action.drift)}"


def _documents_of(simulation: Simulation, explaining: bool) -> Iterator[str]:
    """The resulting objects as YAML, with explanations as comments."""
    for step in _final(simulation):
        if explaining:
            yield from _why(step, explaining)
        if step.after is not None:
            yield from ("---", yaml.safe_dump(_unowned(step.after), sort_keys=False).rstrip())
    if explaining:
        yield from _notes(simulation)


def _lines(before: Object | None, after: Object | None, name: str) -> Iterator[str]:
    old, new = (yaml.safe_dump(obj, width=110).splitlines() if obj else [] for obj in (before, after))
    heads = (name if before else "/dev/null", name if after else "/dev/null")
    yield from difflib.unified_diff(old, new, *heads, lineterm="")


def _notes(simulation: Simulation) -> Iterator[str]:
    """Decisions without actions, warnings, and the state of models."""
    yield from (f"# {about}: {note}" for about, notes in sorted(_told(simulation).items()) for note in notes)
    yield from _model_notes(simulation)


def _told(simulation: Simulation) -> dict[str, list[str]]:
    told = {f"{key.kind} {key.namespace}/{key.name}": list(notes) for key, notes in simulation.notes.items() if notes}
    for world in simulation.worlds():
        warnings = [f"warning {reason}: {with_fix(reason, text)}" for reason, text in cautions(world)]
        if warnings:
            told.setdefault(f"pool {world.pool.namespace}/{world.pool.name}", []).extend(warnings)
    return told


def _model_notes(simulation: Simulation) -> Iterator[str]:
    pools = [world.pool for world in simulation.worlds()]
    for namespace in sorted({pool.namespace for pool in pools}):
        found = simulation.objects(API_VERSION, MODEL, namespace)
        models = [InferenceModel.from_object(observed.object) for observed in found]
        own = [pool for pool in pools if pool.namespace == namespace]
        for name, status in sorted(model_statuses(models, own, simulation.now).items()):
            said = status["conditions"][0]
            yield f"# model {namespace}/{name}: {said['reason']}: {said['message']}"


def _clean(obj: Object | None) -> Object | None:
    """The object without fields of the API server and of the simulation."""
    if obj is None:
        return None
    meta = {name: value for name, value in obj["metadata"].items() if name not in _NOISE}
    if "ownerReferences" in meta:
        meta["ownerReferences"] = [
            {k: v for k, v in owner.items() if k != "uid" or not str(v).startswith("uid-of-")}
            for owner in meta["ownerReferences"]
        ]
    return {name: value for name, value in {**obj, "metadata": meta}.items() if name != "status"}


def _unowned(obj: Object) -> Object:
    """The object without owners that have no uid, which a cluster would refuse."""
    cleaned = _clean(obj) or {}
    meta = {**cleaned["metadata"]}
    owners = [owner for owner in meta.pop("ownerReferences", ()) if "uid" in owner]
    return {**cleaned, "metadata": meta | ({"ownerReferences": owners} if owners else {})}
