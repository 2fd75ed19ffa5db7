"""The Python calls of the scheduler's process for a chat: the same on every machine, however busy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.runtime_engine import Memory
from treeline_runtime.config import SchedulerConfig
from treeline_runtime.messages import GenerateReq, SamplingParams
from treeline_runtime.models.loader import load_model
from treeline_runtime.ops import onednn
from treeline_runtime.scheduler.scheduler import Scheduler

MODEL = Path(__file__).resolve().parents[3] / "models" / "tiny"
CHAT, STEP = 1780, 410
"""Calls: for four tokens in all, and for each further token."""


def test_a_chat_of_four_tokens_takes_few_python_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "can_pack", lambda _: False)  # the same products on every processor
    transport = Memory()
    config = SchedulerConfig(model=str(MODEL), load_format="dummy", max_total_tokens=4096, device="cpu", threads=1)
    scheduler = Scheduler(config, load_model(config), transport)

    def calls(rid: str, tokens: int) -> int:
        count = 0

        def note(frame: object, event: str, arg: object) -> None:
            nonlocal count
            count += event == "call"

        params = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=tokens)
        transport.inbox.append(GenerateReq(rid, [ord(char) for char in (rid * 6)[:32]], params))
        sys.setprofile(note)
        try:
            while scheduler.step():
                pass
        finally:
            sys.setprofile(None)
        assert sum(len(out.token_ids) for out in transport.outs[rid]) == tokens
        return count

    calls("the first", 4)  # pays for what is done once
    four, eight = calls("a chat", 4), calls("another", 8)
    assert (four <= CHAT, eight - four <= 4 * STEP) == (True, True), f"{four} calls, {(eight - four) / 4} a token"
