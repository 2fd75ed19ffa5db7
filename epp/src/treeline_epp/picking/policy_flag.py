"""The flag `--policy`: its value and its words."""

from __future__ import annotations

import argparse

import msgspec

from treeline_epp.picking.policies import POLICIES, PolicyError, choice_of


def policy_flag(text: str) -> str:
    """The value of `--policy`, by the policy's own name. Raises argparse's complaint, which lists what there is."""
    try:
        return str(choice_of(text))
    except PolicyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def policy_help() -> str:
    """All policies with their parameters and defaults."""
    return (
        "how endpoints are chosen, and with which parameters, for example cache_aware:cache_threshold=0.5 "
        f"(default %(default)s). There are {', '.join(map(_described, sorted(POLICIES)))}; see docs/routing.md"
    )


def _described(name: str) -> str:
    fields = msgspec.structs.fields(POLICIES[name].parameters)
    given = ", ".join(f"{field.name}={field.default}" for field in fields)
    return f"{name} ({given})" if given else name
