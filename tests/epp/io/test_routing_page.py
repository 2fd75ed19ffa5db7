"""docs/routing.md is correct: its commands run, its tables match the code, its pool is valid."""

from __future__ import annotations

import asyncio
import io
import re
import shlex
from pathlib import Path

import msgspec
import pytest
import yaml
from support.epp_io import engines, running_picker
from treeline_epp.command import main
from treeline_epp.kube.pools import own_pool
from treeline_epp.kvevents.states import SubscriptionState
from treeline_epp.options import options_of
from treeline_epp.picking.filters import FILTERS
from treeline_epp.picking.policies import POLICIES, choice_of
from treeline_epp.picking.score import Scored
from treeline_operator.api.pool import InferencePool

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "routing.md").read_text()
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) for line in block.splitlines()
]
SERVERS = [line for line in COMMANDS if line.startswith("treeline pick --")]
QUESTIONS = [line for line in COMMANDS if "treeline pick explain" in line]


def table(heading: str) -> list[list[str]]:
    """Return the rows of the first table below a heading, cell by cell."""
    below = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [
        line.strip().removeprefix("|").removesuffix("|").split("|") for line in below.splitlines() if line[:1] == "|"
    ]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_command_of_the_page_is_run() -> None:
    assert len(SERVERS) == 3
    assert len(QUESTIONS) == 3
    assert len(SERVERS) + len(QUESTIONS) == len(COMMANDS)


@pytest.mark.parametrize("command", SERVERS)
def test_flags_are_understood(command: str) -> None:
    options = options_of(shlex.split(command)[2:])
    assert options.policy.partition(":")[0] in command + " predicted_ttft"


async def test_the_pages_explain_commands_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = re.findall(r"^```\npolicy .*?\n```$", PAGE, re.DOTALL | re.MULTILINE)[0].splitlines()[1:-1]
    async with engines(2) as made:
        flags = shlex.split(SERVERS[0])[2:]
        for engine, port in zip(made, ("8001", "8002"), strict=True):
            flags = [flag.replace(f"127.0.0.1:{port}", engine.address) for flag in flags]
        async with running_picker(*flags, debug=False) as picker:
            for command in QUESTIONS:
                said, _, asked = command.rpartition(" | ")
                body = "".join(shlex.split(said)[1:]).encode()
                monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(body)))
                argv = [*shlex.split(asked)[2:], "--url", f"http://127.0.0.1:{picker.options.admin_port}"]
                assert await asyncio.to_thread(main, argv) == 0
                shown = capsys.readouterr().out.splitlines()
                if said:
                    assert shown[:2] == printed[:2]
                    assert {line.split()[1] for line in shown[2:]} == {"a", "b"}
                else:
                    assert shown


def test_the_table_of_policies_is_the_registry() -> None:
    rows = {code(row[0])[0]: row for row in table("Policies")}
    assert set(rows) == set(POLICIES)
    for name, row in rows.items():
        fields = msgspec.structs.fields(POLICIES[name].parameters)
        assert code(row[2]) == [f"{field.name}={field.default}" for field in fields]
        for parameter in code(row[2]):
            if not parameter.endswith("="):
                choice_of(f"{name}:{parameter}")


def test_the_other_tables_match_the_code() -> None:
    assert [code(row[0])[0] for row in table("Filters")] == [one.name for one in FILTERS]
    terms = [name for name in Scored.__struct_fields__ if name.endswith("_s") and name not in ("cost_s", "ttft_s")]
    assert [code(row[0])[0] for row in table("Costs")] == terms
    states = [state for row in table("States of a subscription") for state in code(row[0])]
    assert states == [state.value for state in SubscriptionState]


def test_the_sample_pool_is_valid_and_its_policy_reaches_the_picker() -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    found = yaml.safe_load(text)
    pool = InferencePool.model_validate(found)
    assert choice_of(pool.spec.endpoint_picker.chosen) == choice_of(
        own_pool(msgspec.Raw(msgspec.json.encode(found))).policy
    )
