"""The picker behind a real Envoy, in front of fake engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.epp_io import data_plane, engines
from treeline_wire import headers as names

pytestmark = pytest.mark.integration


async def test_a_request_goes_where_the_picker_says(tmp_path: Path) -> None:
    async with engines() as fakes, data_plane(tmp_path, fakes, add_endpoint_header=True) as plane:
        answer = await plane.complete()
        assert answer.status_code == 200, answer.text
        print(answer.headers, answer.text)
        print(await plane.picker.metrics())
        print(plane.envoy.access())
        by_name = {fake.name: fake.address for fake in fakes}
        assert answer.headers[names.ENDPOINT] == by_name[answer.json()["engine"]]
