"""Clients of `/v1/messages` that get no endpoint receive Anthropic's error format from picker and Envoy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.epp_io import data_plane, engines, equal, until
from treeline_epp.extproc.state import BodyMode, ExtProcState, Kind, Message
from treeline_epp.picking.decision import NoEndpoints, Saturated
from treeline_epp.requests import refusals
from treeline_epp.requests.body import Immediate
from treeline_epp.requests.refusals import Refusal
from treeline_wire.anthropic_errors import is_anthropics

SAID: dict[str, Any] = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "theirs"),
    [
        ("/v1/messages", True),
        ("/v1/messages/", True),
        ("/v1/messages/count_tokens", True),
        ("/pool/v1/messages", True),
        ("/v1/messages_of_others", False),
        ("/v1/chat/completions", False),
        ("/v1/models/v1/messages", True),
        ("", False),
    ],
)
def test_errors_have_the_format_of_their_paths_api(path: str, theirs: bool) -> None:
    assert is_anthropics(path) is theirs


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (refusals.bad_request("no", param="model"), "invalid_request_error"),
        (refusals.model_not_found("m", ["tiny"]), "not_found_error"),
        (refusals.path_not_served(), "not_found_error"),
        (refusals.body_too_large(5), "request_too_large"),
        (refusals.too_many_requests(5), "rate_limit_error"),
        (refusals.no_room(5), "overloaded_error"),
        (refusals.of_pick(Saturated("full", 2.0)), "rate_limit_error"),
        (refusals.of_pick(NoEndpoints("none")), "overloaded_error"),
        (refusals.internal_error(), "api_error"),
    ],
    ids=str,
)
def test_a_refusal_has_the_format_of_the_clients_api(refusal: Refusal, kind: str) -> None:
    told = {}
    for path in ("/v1/messages?beta=true", "/v1/completions", "/api/chat"):
        state = ExtProcState(BodyMode.BUFFERED, BodyMode.NONE, body_limit=10)
        state.receive(Message(Kind.REQUEST_HEADERS, headers={":path": path, ":method": "POST"}))
        (reply,) = state.refuse(refusal)
        assert isinstance(reply, Immediate)
        assert (reply.status, reply.headers) == (refusal.status, refusal.headers())
        told[path] = json.loads(reply.body)
    theirs, ours, ollamas = told.values()
    assert ollamas == {"error": refusal.message}
    assert theirs == {"type": "error", "error": {"type": kind, "message": refusal.message}}
    assert ours["error"]["message"] == refusal.message
    assert ours["error"]["code"] == refusal.code


def test_a_refusal_before_the_path_is_known_has_openais_format() -> None:
    (reply,) = ExtProcState(body_limit=10).refuse(refusals.internal_error())
    assert isinstance(reply, Immediate)
    assert json.loads(reply.body)["error"]["code"] == "internal_error"


@pytest.mark.integration
@pytest.mark.deep
async def test_anthropics_client_reads_the_pickers_errors(tmp_path: Path) -> None:
    import anthropic  # takes seconds

    async with (
        engines(1) as (engine,),
        data_plane(
            tmp_path, [engine], "--max-body-bytes", "100000", fail_open=False, api_keys={"ada": "sk-ada"}
        ) as plane,
        anthropic.AsyncAnthropic(base_url=plane.envoy.url, api_key="sk-ada", max_retries=0) as client,
    ):

        async def told(
            error: type[anthropic.APIStatusError], who: anthropic.AsyncAnthropic = client, **asked: Any
        ) -> dict[str, Any]:
            with pytest.raises(error) as raised:
                await who.messages.create(**{"model": "tiny"} | SAID | asked)
            body = raised.value.body
            assert isinstance(body, dict)
            assert set(body) == {"type", "error"}
            assert body["type"] == "error"
            assert set(body["error"]) == {"type", "message"}
            return dict(body["error"])

        assert (await told(anthropic.NotFoundError, model="gpt-9"))["type"] == "not_found_error"
        assert (await told(anthropic.BadRequestError, model=7))["type"] == "invalid_request_error"
        large = [{"role": "user", "content": "x" * 200_000}]
        assert (await told(anthropic.ContentTooLargeError, messages=large))["type"] == "request_too_large"
        with pytest.raises(anthropic.BadRequestError, match="not JSON"):
            await client.post("/v1/messages", content=b"{", cast_to=object)
        with pytest.raises(anthropic.NotFoundError, match="gpt-9"):
            async with client.messages.stream(model="gpt-9", **SAID):
                pass
        # What Envoy says itself:
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await client.messages.batches.list()
        eve = client.with_options(api_key="sk-eve")
        refused = await told(anthropic.AuthenticationError, eve)
        assert refused == {"type": "authentication_error", "message": "Missing or unknown API key."}
        engine.ready = False
        ada = {"x-api-key": "sk-ada"}
        await until(lambda: equal(plane.status(headers=ada), 503), "the picker knows of it")
        assert (await told(anthropic.ServiceUnavailableError))["type"] == "overloaded_error"
        await plane.picker.stop()
        refused = await told(anthropic.ServiceUnavailableError)
        assert refused == {"type": "overloaded_error", "message": "The picker does not answer; try again."}
        answer = await plane.complete(headers=ada)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "picker_unavailable")
