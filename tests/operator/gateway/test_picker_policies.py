"""The policies that a pool may choose are the picker's, with the picker's parameters, and reach it."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from pydantic.alias_generators import to_camel
from support.gateway_cluster import container, converged, pool
from treeline_epp.kube.pools import own_pool
from treeline_epp.options import options_of
from treeline_epp.picking.policies import ALIASES, POLICIES, choice_of
from treeline_operator.api.gateway import HEEDING, PARAMETERS, EndpointPicker, Policy, PolicyParameters

VALUES: dict[str, Any] = {
    "cacheThreshold": 0.25,
    "balanceAbsThreshold": 1_000_000.0,
    "balanceRelThreshold": 1.0001,
    "prefixTokenCount": 64,
    "loadFactor": 2.5,
    "bucketAdjustIntervalSecs": 0.5,
    "loadS": 0.0,
    "rememberS": 1e-05,
}


def test_a_pool_can_choose_every_policy_of_the_picker() -> None:
    assert set(get_args(Policy)) == {*POLICIES, *ALIASES}
    assert set(get_args(Policy)) > HEEDING


def test_policy_parameters_equal_the_pickers() -> None:
    for name in set(get_args(Policy)) - set(ALIASES):
        fields = {field.name for field in msgspec.structs.fields(POLICIES[name].parameters)}
        assert {to_camel(field) for field in fields} == {key for key, whose in PARAMETERS.items() if name in whose}
    assert {field.alias for field in PolicyParameters.model_fields.values()} == set(PARAMETERS) == set(VALUES)


@pytest.mark.parametrize("policy", get_args(Policy))
def test_every_choice_is_understood_as_a_flag_and_from_the_pool(policy: str) -> None:
    parameters = {key: value for key, value in VALUES.items() if policy in PARAMETERS[key]}
    settings = {"policy": policy, "policyParameters": parameters}
    made = EndpointPicker.model_validate(settings)
    argument = next(
        word
        for word in container(converged(pool("a", endpointPicker=settings)), "treeline-epp")["args"]
        if word.startswith("--policy=")
    )
    assert argument == f"--policy={made.chosen}"
    options = options_of([argument, "--gateway", "g"])
    wanted = choice_of(options.policy)
    assert wanted.name == ALIASES.get(policy, policy)
    assert {to_camel(key) for key in wanted.parameters} == set(parameters)
    seen = own_pool(msgspec.Raw(msgspec.json.encode({"metadata": {"name": "a"}, "spec": {"endpointPicker": settings}})))
    read = POLICIES[wanted.name].parameters
    flag, own = (dict(choice.parameters) for choice in (wanted, choice_of(seen.policy)))
    assert msgspec.convert(flag, read, strict=False) == msgspec.convert(own, read, strict=False)
