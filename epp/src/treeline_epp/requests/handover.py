"""How a request is handed over from the engine that computes its prompt to the one that answers: what each protocol
adds to the two requests (docs/disaggregation.md). Pure.

The copy for the prefill engine is the client's request with further members; so are the client's model in the pool, its
salt, and all that decides the prompt's tokens in both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct
from treeline_wire.headers import PAGES_FROM, PREFILLER

from treeline_epp.endpoints.spec import EndpointSpec, split_address
from treeline_epp.endpoints.transfer import Protocol

MEMBERS: Final = (
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disagg_prefill_dp_rank",
)
"""Members of bodies by which a request names the engine that has its prompt, or its images. Clients must not name any.
"""
_PARAMS, _EXTRA, _XARGS = "sampling_params", "extra_args", "vllm_xargs"
"""vLLM reads the same members in `vllm_xargs`, and in the `extra_args` of `sampling_params`."""

_ONE_TOKEN: Final = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1}
_WHOLE: Final = {"stream": False, "stream_options": None}


class BadHandover(ValueError):
    """The prefill engine's answer does not say where the prompt is."""


class Handover(Struct, frozen=True):
    """The handover of one request. `copy` are the members to set for the prefill engine; None: the picker does not ask
    it. `members` are those for the engine that answers, `headers` its headers. `waits`: that engine can be asked only
    after the prefill engine has answered, with `place(answer)` besides, which raises BadHandover. `abort`: what to post
    to `/abort_request` of that engine, if the prompt does not come; empty: it computes the prompt itself.
    """

    copy: Mapping[str, Any] | None = None
    members: Mapping[str, Any] = {}
    headers: tuple[tuple[str, str | None], ...] = ()
    waits: bool = False
    place: Callable[[bytes], Mapping[str, Any]] = lambda _answer: {}
    abort: bytes = b""


def pages_at(source: EndpointSpec) -> tuple[str, str]:
    """Return the header by which our runtime finds pages at another one."""
    assert source.transfer is not None, "it gives pages"
    host = split_address(source.address)[0]
    return PAGES_FROM, f"{f'[{host}]' if ':' in host else host}:{source.transfer.port + (source.rank or 0)}"


def handover(prefill: EndpointSpec, decode: EndpointSpec, path: str, room: int, within_s: float) -> Handover:
    """Return how these two endpoints hand over a request on `path`. `room` (below 2⁶³) is another one at each try;
    `within_s`: how long an engine that can compute the prompt waits for a part of it.
    """
    assert decode.transfer is not None, "they fit together"
    match decode.transfer.protocol:
        case Protocol.NIXL:
            asked = {"do_remote_decode": True, "do_remote_prefill": False}
            unknown = dict.fromkeys(("engine_id", "block_ids", "host", "port"))
            params = asked | {f"remote_{name}": value for name, value in unknown.items()}
            return Handover({**_WHOLE, **_ONE_TOKEN, "kv_transfer_params": params}, waits=True, place=place_of)
        case Protocol.SGLANG:
            assert prefill.transfer is not None, "they fit together"
            host, port, rid = split_address(prefill.address)[0], prefill.transfer.port, f"{room:016x}"
            members = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room, "rid": rid}
            return Handover({**_WHOLE, **members}, members, abort=msgspec.json.encode({"rid": rid}))
        case Protocol.TREELINE:
            copy: Mapping[str, Any] = {"stream": False, "sampling_params": {"max_new_tokens": 1}}
            if path != "/generate":
                only_chats = {} if path.endswith("/chat/completions") else {"max_completion_tokens": None}
                copy = {**_WHOLE, **_ONE_TOKEN, **only_chats}
            name, address = pages_at(prefill)
            return Handover(copy, headers=((name, f"{address};within={within_s:.1f}"),))
        case Protocol.LLM_D:
            return Handover(headers=((PREFILLER, prefill.address),))


class _Answer(Struct):
    kv_transfer_params: Raw = Raw(b"null")


def place_of(answer: bytes) -> Mapping[str, Any]:
    """Return the members, from the prefill engine's answer, that say where the prompt is. Raises BadHandover."""
    try:
        params = msgspec.json.decode(answer, type=_Answer).kv_transfer_params
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadHandover(f"its answer is no JSON object: {error}") from None
    if not bytes(params).startswith(b"{"):
        raise BadHandover("its answer has no kv_transfer_params: was it started with a NixlConnector?")
    return {"kv_transfer_params": params}


def named(members: Mapping[str, Any], unread: Collection[str] = ()) -> str | None:
    """Return a member by which a client names an engine, or may name one since that member is too large to be read;
    None without one. A null names none.
    """
    params = members.get(_PARAMS)
    places = [members, members.get(_XARGS), params.get(_EXTRA) if isinstance(params, dict) else None]
    found = (name for one in places if isinstance(one, dict) for name in MEMBERS if one.get(name) is not None)
    return next((name for name in (*MEMBERS, _XARGS, _PARAMS) if name in unread), None) or next(found, None)
