"""Forms (`multipart/form-data`), as recordings are sent: routed by the model that they name, which may be rewritten."""

from __future__ import annotations

import httpx
import pytest
from treeline_epp.picking.request import Request
from treeline_epp.requests.body import CHUNK_BYTES, Body, RouteRequest
from treeline_epp.requests.forms import model_field
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.outline import Outline
from treeline_epp.requests.parse import parse
from treeline_epp.requests.rewrite import to_send
from treeline_wire.models import ModelRule, PoolClaim

PATH = "/v1/audio/transcriptions"
WAV = b"RIFF\0\0{,[" * 40_000


def form(*fields: tuple[str, object]) -> bytes:
    """Return a form as a client writes it, its fields in this order."""
    request = httpx.Request("POST", "http://gateway", files=fields)  # type: ignore[arg-type]
    return request.read()


def sent(model: str, recording: bytes = WAV) -> list[bytes]:
    """Return forms with the model before and after the recording."""
    file, name = ("file", ("a.wav", recording)), ("model", (None, model))
    return [form(name, ("language", (None, "en")), file), form(file, ("language", (None, "en")), name)]


def served() -> ModelRegistry:
    registry = ModelRegistry()
    registry.set_endpoint("a", "chats", ("chat",), None)
    registry.set_endpoint("b", "speech", ("asr",), None)
    return registry


def routed(body: bytes | Body, registry: ModelRegistry) -> Request:
    outline = None
    if isinstance(body, Body):
        outline = Outline()
        for piece in body.pieces():
            outline.feed(piece)
        outline.finish(body)
    found = parse(RouteRequest({":path": PATH, ":method": "POST"}, body, None), registry, outline=outline)
    assert isinstance(found, Request), found
    return found


@pytest.mark.parametrize("large", [False, True])
def test_a_form_goes_to_the_pool_of_its_model(large: bool) -> None:
    for model, pool in (("asr", "speech"), ("chat", "chats"), ("other", None)):
        for body in sent(model):
            assert routed(Body([body]) if large else body, served()).pool == pool


@pytest.mark.parametrize("large", [False, True])
def test_the_model_of_a_form_is_rewritten_and_nothing_else(large: bool) -> None:
    registry = served()
    registry.set_pools({"speech": PoolClaim("here")}, [ModelRule("r", "whisper-1", "speech", targets=(("asr", 1),))])
    for before, after in zip(sent("whisper-1"), sent("asr"), strict=True):
        request = routed(Body([before]) if large else before, registry)
        assert (request.pool, request.model) == ("speech", "asr")
        made = to_send(Body([before]) if large else before, None, request)
        assert made is not None
        whole = made.joined() if isinstance(made, Body) else made
        assert _without_boundary(whole) == _without_boundary(after)


def _without_boundary(body: bytes) -> bytes:
    return body.replace(body.partition(b"\r\n")[0], b"")


def test_only_a_field_names_a_model() -> None:
    field = b'\r\n--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nasr\r\n--x'
    within = form(("file", ("a.wav", field)), ("language", (None, "en")))
    for body in (
        within,
        form(("file", ("model", b"asr"))),
        form(("model", ("model", b"asr"))),
        b"--\r\n",
        b"--x",
        b"-",
    ):
        assert model_field(body) is None
    far = form(("file", ("a.wav", b" " * CHUNK_BYTES)), ("model", (None, "asr")), ("file", ("b", b" " * CHUNK_BYTES)))
    assert model_field(far) is None, "between two recordings it is not looked for"
