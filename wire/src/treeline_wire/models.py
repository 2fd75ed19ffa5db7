"""Which pool serves a model: the one pure function that the picker and the gateway's `/v1/models` agree on."""

from collections.abc import Iterable, Mapping

import msgspec


class ModelNotFound(LookupError):
    """No pool serves the model. `name` is what the request asked for; a 404 `model_not_found`."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        if name is None:
            super().__init__("the request names no model and more than one is served")
        else:
            super().__init__(f"The model `{name}` does not exist or you do not have access to it.")


class ModelTarget(msgspec.Struct, frozen=True):
    """Where a request for a model goes: the pool, and the model name that the pool's engines know."""

    pool: str
    target: str


def resolve_model(name: str | None, pools: Mapping[str, Iterable[str]]) -> ModelTarget:
    """Pick the pool for `name`, the `model` of a request's body.

    `pools` maps a pool's name to the models that it serves. The first pool that serves the model wins. A request
    without a model is served only where there is nothing to choose: one model in all. Raises `ModelNotFound`.
    """
    if name is None:
        served = {ModelTarget(pool, model) for pool, models in pools.items() for model in models}
        if len(served) != 1:
            raise ModelNotFound(None)
        return next(iter(served))
    for pool, models in pools.items():
        if name in models:
            return ModelTarget(pool, name)
    raise ModelNotFound(name)


def served_models(pools: Mapping[str, Iterable[str]]) -> list[str]:
    """All models that can be asked for, each once, in the pools' order."""
    return list(dict.fromkeys(model for models in pools.values() for model in models))
