"""A picker on real sockets follows chats with images: to the runtime whose events spell them, however it is asked."""

from __future__ import annotations

import base64
import json

from support.epp_io import FakePublisher, engines, running_picker, stored, until
from support.http import client
from support.vision import WRITTEN, bundle, ids_of, image_part, item, picture, rendered
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.explain_api import EXPLAIN
from treeline_epp.kvevents.item_events import ItemEvents
from treeline_epp.metrics import Metrics
from treeline_epp.picking.decision import Lease
from treeline_epp.picking.picker import Picker
from treeline_epp.requests.body import RouteRequest
from treeline_epp.requests.model_registry import Adapters, ModelRegistry
from treeline_epp.requests.router import Router
from treeline_wire.events import BlockStored

CHAT = "/v1/chat/completions"
LONG = 300_000
"""Bytes of an image whose body is read by its outline."""


async def test_a_chat_with_an_image_goes_to_the_runtime_that_has_it() -> None:
    question = [{"role": "user", "content": ["see ", WRITTEN, "?"]}]
    async with engines(2, models=("vl",)) as made:
        publishers = [FakePublisher(epoch=epoch) for epoch in (1, 2)]
        for engine, publisher in zip(made, publishers, strict=True):
            info = {"kv_events": publisher.kv_events(), "epoch": publisher.epoch}
            engine.documents["/server_info"] = {**info, "tokenizer_fingerprint": bundle().fingerprint}
            engine.documents["/treeline/tokenizer"] = bundle().to_json()
        flags = [word for engine in made for word in ("--endpoint", f"{engine.name}={engine.address}")]
        try:
            async with running_picker(*flags) as picker, client(timeout=60) as http:
                for seed, size, holder in ((1, 60, 1), (2, LONG, 0)):
                    ids = ids_of(rendered(question), [item(picture(seed, size), 200)])
                    await publishers[holder].store(stored(ids))
                    parts = [{"type": "text", "text": "see "}, image_part(picture(seed, size))]
                    parts.append({"type": "text", "text": "?"})
                    body = json.dumps({"model": "vl", "messages": [{"role": "user", "content": parts}]}).encode()
                    asked = {"path": CHAT, "body": base64.b64encode(body).decode()}

                    async def found(asked: dict[str, str] = asked, holder: int = holder) -> bool:
                        url = f"http://127.0.0.1:{picker.options.admin_port}{EXPLAIN}"
                        best = (await http.post(url, json=asked)).json()["endpoints"][0]
                        return best["endpoint"] == f"e{holder}" and best["terms"]["confirmed_tokens"] > 190

                    await until(found, f"image {seed} to be found at engine {holder}")
        finally:
            for publisher in publishers:
                publisher.stop()


def test_a_routed_image_is_expected_where_it_went() -> None:
    """So that vLLM's name of it can be learnt there."""
    registry, picker = ModelRegistry(), Picker()
    keyer = registry.add_keyer(bundle())
    registry.set_endpoint("a", "default", ("vl",), keyer.fingerprint, adapters=Adapters("vllm"))
    picker.add_endpoint(EndpointSpec("a", "10.0.0.1:8000", models=("vl",)))
    parts = [image_part(picture(1)), {"type": "text", "text": "what is this?"}]
    body = json.dumps({"model": "vl", "messages": [{"role": "user", "content": parts}]}).encode()
    lease = Router(picker, registry, Metrics()).route(RouteRequest({":path": CHAT, ":method": "POST"}, body, None))
    assert isinstance(lease, Lease)
    one = item(picture(1), 20)
    ids = ids_of(rendered([{"role": "user", "content": [WRITTEN, "what is this?"]}]), [one])
    event = stored(ids)
    at = ids.index(next(token for token in ids if token >= 1 << 31))
    pad = next(iter(keyer.media.placeholder_ids)) if keyer.media is not None else 0
    extra = [[["a name", at - begin]] for begin in range(0, len(event.token_ids), 16)]
    sent = BlockStored(event.block_hashes, None, [min(token, pad) for token in event.token_ids], 16, extra_keys=extra)
    assert keyer.media is not None
    read = ItemEvents(keyer.media, "a").read(sent)
    assert isinstance(read, BlockStored)
    assert read.token_ids == event.token_ids
