"""The folder of a profile: removed if the scheduler refuses, kept if the profile may still begin. The scheduler is
simulated."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from treeline_runtime.args import ServerArgs
from treeline_runtime.messages import Reply
from treeline_runtime.server.administration import Administration
from treeline_runtime.server.errors import ApiError
from treeline_runtime.tokenizer_manager import NoReply


@pytest.mark.parametrize(
    ("said", "status", "stays"),
    [(NoReply("in 60 s"), 503, True), (Reply("1", ok=False, message="a profile is running"), 400, False)],
)
async def test_the_folder_of_a_profile_that_may_still_begin_stays(
    said: Reply | NoReply, status: int, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def ask(*_: object, **__: object) -> Reply:
        if isinstance(said, NoReply):
            raise said
        return said

    def folders() -> list[Path]:
        return list(tmp_path.iterdir())

    service: Any = SimpleNamespace(manager=SimpleNamespace(ask=ask, ranks=[None]))
    asked: Any = SimpleNamespace(query_params={}, json_object=dict)
    with pytest.raises(ApiError) as refused:
        await Administration(service, ServerArgs(model="m")).start_profile(asked)
    assert (refused.value.status, bool(folders())) == (status, stays)
