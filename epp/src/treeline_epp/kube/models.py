"""From InferenceModels to the rules by which wire's pure function resolves names. Pure."""

from __future__ import annotations

from typing import get_args

import msgspec
from treeline_wire.models import Criticality, ModelRule

from treeline_epp.kube import objects


def read_model(data: msgspec.Raw) -> ModelRule | None:
    """An InferenceModel from its JSON; `None` when it is being deleted. Raises `msgspec.MsgspecError`.

    Whoever deletes one takes its name away at once, also where a finalizer keeps the object: the operator sees it so.
    """
    found = _model(data)
    meta, spec = found.metadata, found.spec
    if meta.deletion_timestamp is not None:
        return None
    return ModelRule(
        name=meta.name,
        model_name=spec.model_name,
        pool=spec.pool_ref.name,
        criticality=_CRITICALITY.get(spec.criticality or "", "Standard"),
        targets=tuple((target.name, target.weight) for target in spec.target_models or ()),
        fallback_pools=tuple(ref.name for ref in spec.fallback_pools or ()),
        created=meta.creation_timestamp or "",
        uid=meta.uid,
    )


_CRITICALITY: dict[str, Criticality] = {name: name for name in get_args(Criticality)}
_model = msgspec.json.Decoder(objects.Specified[objects.ModelSpec]).decode
