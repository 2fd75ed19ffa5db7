"""Header modes of a real Envoy that leave headers out: requests and answers arrive whole, whatever the body modes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.epp_io import data_plane, engines
from treeline_operator.envoy.listener import PICKED_FILTER


def modes(**fields: str) -> Any:
    """Set another proxy's modes. That proxy has no filter like ours that looks for the picker's headers: if the picker
    does not get the headers, it answers after that filter."""

    def patch(bootstrap: dict[str, Any]) -> None:
        listener = bootstrap["static_resources"]["listeners"][0]
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
            route.get("typed_per_filter_config", {}).pop(PICKED_FILTER, None)
        found = [f["typed_config"] for f in manager["http_filters"] if "processing_mode" in f.get("typed_config", {})]
        assert found
        for one in found:
            one["processing_mode"].update(fields)

    return patch


@pytest.mark.integration
@pytest.mark.deep
@pytest.mark.parametrize("mode", ["STREAMED", "BUFFERED", "FULL_DUPLEX_STREAMED"])
@pytest.mark.parametrize("left_out", ["request_header_mode", "response_header_mode"])
async def test_omitted_headers_lose_neither_body(tmp_path: Path, mode: str, left_out: str) -> None:
    settings = {"request_body_mode": mode, "response_body_mode": mode, "fail_open": False}
    trailers = {"request_trailer_mode": "SEND", "response_trailer_mode": "SEND"}
    patch = modes(**{left_out: "SKIP"}, **trailers)
    async with engines() as fakes, data_plane(tmp_path, fakes, patch=patch, **settings) as plane:
        for fake in fakes:
            fake.reply_body = bytes(range(256)) * 400
        for size in (1, 200_000):
            answer = await plane.complete("x" * size)
            assert (answer.status_code, answer.content) == (200, fakes[0].reply_body)
            (seen,) = [s for fake in fakes for s in fake.served]
            assert json.loads(seen.body) == {"model": "tiny", "prompt": "x" * size}
            for fake in fakes:
                fake.seen.clear()
        metrics = await plane.picker.metrics()
        assert not metrics.get("treeline_epp_protocol_errors_total")
        assert not [name for name in metrics if name.startswith("treeline_epp_refusals_total")]
