"""Images in requests: hashed where they stand, whatever the form and size of the body."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cpu import reference_s
from support.vision import PAD, PROCESSOR, TEMPLATE, WRITTEN, bundle, ids_of, image_part, item, picture, rendered, url
from treeline_epp.keyers import prompt_keyer
from treeline_epp.keyers.prompt_keyer import PromptKeyer
from treeline_epp.picking.request import Request
from treeline_epp.requests.body import CHUNK_BYTES, Body, RouteRequest
from treeline_epp.requests.content import MAX_CONTENTS, hash_contents
from treeline_epp.requests.model_registry import Adapters, ModelRegistry
from treeline_epp.requests.outline import Outline
from treeline_epp.requests.parse import parse
from treeline_wire.keys import PrefixKeys, item_key
from treeline_wire.media import Item, MediaSpec, item_digest
from treeline_wire.tokenizer import TokenizerBundle

KEYS = PrefixKeys.from_bundle(bundle())
CHAT = "/v1/chat/completions"
COUNT = 70
MB = 1 << 20
PAD_KEY = KEYS.prompt_key(PAD, False)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow a rendering long enough for a garbage collection: these tests compare keys."""
    monkeypatch.setattr(prompt_keyer, "RENDER_SECONDS", 60.0)


def served(engine: str = "treeline", made: TokenizerBundle | None = None) -> tuple[ModelRegistry, PromptKeyer]:
    registry = ModelRegistry()
    keyer = registry.add_keyer(made or bundle())
    registry.set_endpoint("e", "default", ("vl",), keyer.fingerprint, adapters=Adapters(engine))
    return registry, keyer


def learnt(keyer: PromptKeyer, *pictures: bytes) -> None:
    assert keyer.media is not None
    for data in pictures:
        keyer.media.learn(item(data, COUNT).digest, COUNT)


def outlined(body: bytes, piece: int = CHUNK_BYTES) -> tuple[Body, Outline]:
    """Return a body as a large one is read, in pieces of this size."""
    pieces = Body([body[at : at + piece] for at in range(0, len(body), piece)])
    outline = Outline()
    for one in pieces.pieces():
        outline.feed(one)
    outline.finish(pieces)
    for _ in hash_contents(pieces, outline):
        pass
    return pieces, outline


def routed(registry: ModelRegistry, body: dict[str, Any] | bytes, path: str = CHAT, *, large: bool = False) -> Request:
    data = body if isinstance(body, bytes) else json.dumps({"model": "vl", **body}).encode()
    sent, outline = outlined(data) if large else (data, None)
    found = parse(RouteRequest({":path": path, ":method": "POST"}, sent, None), registry, outline=outline)
    assert isinstance(found, Request), found
    return found


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [part if isinstance(part, dict) else text(part) for part in parts]}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


TURNS = st.lists(
    st.lists(st.one_of(st.text("ab\n ", min_size=1, max_size=9), st.integers(0, 3)), min_size=1, max_size=4),
    min_size=1,
    max_size=5,
)


@given(TURNS, st.booleans())
def test_the_key_of_a_chat_is_that_of_the_runtimes_ids(turns: list[list[str | int]], large: bool) -> None:
    registry, keyer = served()
    learnt(keyer, *map(picture, range(4)))
    messages = []
    for number, turn in enumerate(turns):
        parts = [image_part(picture(part)) if isinstance(part, int) else text(part) for part in turn]
        messages.append({"role": "user" if number % 2 == 0 else "assistant", "content": parts})
    shown = [item(picture(part), COUNT) for turn in turns for part in turn if isinstance(part, int)]
    found = routed(registry, {"messages": messages}, large=large)
    assert found.key == KEYS.block_key(ids_of(rendered(messages), shown))
    assert found.key_tokens_estimate is None, "the key covers the whole prompt"


@pytest.mark.parametrize("size", [60, 2000, 100_000, 3 * MB])
@pytest.mark.parametrize("escaped", [False, True], ids=["plain", "escaped"])
def test_large_bodies_have_the_keys_of_small_ones(size: int, escaped: bool) -> None:
    registry, keyer = served()
    data = picture(1, size)
    learnt(keyer, data)
    body = json.dumps({"messages": [user("see ", image_part(data), " this")], "model": "vl"})
    body = body.replace("/", r"\/") if escaped else body
    expected = KEYS.block_key(ids_of(rendered([user("see ", WRITTEN, " this")]), [item(data, COUNT)]))
    assert routed(registry, body.encode()).key == expected
    found = routed(registry, body.encode(), large=True)
    assert found.key == expected
    assert found.prompt_tokens_estimate < 1000, "bytes of an image are no tokens"


@given(st.integers(1, 400), st.integers(0, 1500))
def test_pieces_may_end_anywhere(piece: int, size: int) -> None:
    """Also in the head of an image's string."""
    registry, keyer = served()
    data = picture(3, 1000 + size)
    learnt(keyer, data)
    body = json.dumps({"model": "vl", "messages": [user("a", image_part(data), "b", image_part(data), "c")]}).encode()
    pieces, outline = outlined(body, piece)
    assert len(outline.contents) == 2
    found = parse(RouteRequest({":path": CHAT, ":method": "POST"}, pieces, None), registry, outline=outline)
    assert isinstance(found, Request)
    assert found.key == routed(registry, body).key


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_an_unknown_count_ends_the_key_with_its_image(large: bool) -> None:
    registry, keyer = served()
    one, other = picture(1, 3000), picture(2, 3000)
    first = routed(registry, {"messages": [user("see ", image_part(one), "?")]}, large=large)
    assert first.key is not None
    assert first.key.startswith(KEYS.prompt_key("<|im_start|>user\nsee <|vision_start|>", False))
    assert first.key_tokens_estimate is not None
    assert first.prompt_tokens_estimate > first.key_tokens_estimate
    follow = routed(registry, {"messages": [user("see ", image_part(one), "!"), user("more")]}, large=large)
    assert follow.key == first.key, "the next request with it follows"
    assert routed(registry, {"messages": [user("see ", image_part(other), "?")]}, large=large).key != first.key
    learnt(keyer, one)
    known = routed(registry, {"messages": [user("see ", image_part(one), "?")]}, large=large)
    assert known.key is not None
    assert known.key.endswith(KEYS.prompt_key("<|vision_end|>?<|im_end|>\n<|im_start|>assistant\n", False))


REMOTE = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}


@pytest.mark.parametrize(
    "part",
    [
        REMOTE,
        {"type": "image_url", "image_url": "https://example.com/cat.png"},
        {"type": "image_url", "image_url": {"url": "data:image/svg+xml,<svg/>"}},
        {"type": "image_url"},
        {"type": "image_url", "image_url": {"url": 5}},
        {"type": "image_embeds", "image_embeds": "AAAA", "image": None},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": url(b"x")}},
    ],
)
def test_a_key_ends_before_what_is_unknown(part: dict[str, Any]) -> None:
    registry, keyer = served()
    learnt(keyer, picture(1))
    body = {"messages": [user("see ", image_part(picture(1)), "and ", part, "?")]}
    expected = ids_of(rendered([user("see ", WRITTEN, "and ")], asks=False), [item(picture(1), COUNT)])
    key = routed(registry, body).key
    assert key is not None
    assert KEYS.block_key(expected).startswith(key)
    assert key.endswith(b"and ")


def test_a_key_before_an_unknown_image_ends_with_a_text() -> None:
    registry, keyer = served()
    learnt(keyer, picture(1))
    system = {"role": "system", "content": "Be brief."}
    for known in ([user("look"), user(image_part(picture(1)))], [user("look", image_part(picture(1)))]):
        key = routed(registry, {"messages": [system, *known, user(REMOTE)]}).key
        assert key == KEYS.prompt_key(rendered([system, user("look")], asks=False).removesuffix("<|im_end|>\n"), False)


def test_models_without_images_are_keyed_up_to_the_first() -> None:
    registry, _ = served(made=TokenizerBundle.build(bundle().tokenizer_json, chat_template=TEMPLATE))
    first, other = (
        routed(registry, {"messages": [user("see "), user(image_part(picture(seed)))]}).key for seed in (1, 2)
    )
    assert first == other
    assert first is not None
    assert first.endswith(b"see ")


def test_templates_of_texts_have_a_placeholder_among_them() -> None:
    registry, keyer = served(made=bundle("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"))
    learnt(keyer, picture(1))
    found = routed(registry, {"messages": [user("see", image_part(picture(1)), "?")]})
    assert found.key == KEYS.block_key(ids_of(f"user:see\n{PAD}\n?;", [item(picture(1), COUNT)]))


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_every_api_has_the_key_of_the_chat(large: bool) -> None:
    registry, keyer = served()
    data = picture(1, 3000)
    learnt(keyer, data)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    said = {"type": "input_text", "text": "see "}
    shown = {"type": "input_image", "detail": "auto", "image_url": url(data)}
    expected = KEYS.block_key(ids_of(rendered([user("see ", WRITTEN)]), [item(data, COUNT)]))
    for path, body in (
        (CHAT, {"messages": [user("see ", image_part(data))]}),
        ("/v1/messages", {"messages": [user("see ", {"type": "image", "source": source})], "max_tokens": 5}),
        ("/v1/responses", {"input": [{"type": "message", "role": "user", "content": [said, shown]}]}),
    ):
        assert routed(registry, body, path, large=large).key == expected, path


def test_short_and_long_spellings_are_one_image() -> None:
    registry, keyer = served()
    learnt(keyer, picture(1))
    parts = [image_part(picture(1)), {"type": "image_url", "image_url": url(picture(1))}]
    parts.append({"image_url": {"url": url(picture(1)).replace("png", "jpeg"), "detail": "high"}})
    assert len({routed(registry, {"messages": [user(part)]}).key for part in parts}) == 1


def test_a_key_ends_before_a_video_of_a_model_that_reads_some() -> None:
    spec = MediaSpec({"image": PAD, "video": "<|video_pad|>"}, PROCESSOR)
    made = TokenizerBundle.build(bundle().tokenizer_json, chat_template=TEMPLATE, media=spec)
    video = {"type": "video_url", "video_url": {"url": url(b"x")}}
    key = routed(served(made=made)[0], {"messages": [user("see ", video, "?")]}).key
    assert key is not None
    assert key.endswith(b"see ")


@pytest.mark.parametrize("size", [3, 3000], ids=["tiny", "long"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_a_native_key_ends_at_a_video(size: int, large: bool) -> None:
    spec = MediaSpec({"image": PAD, "video": "<|video_pad|>"}, PROCESSOR)
    registry, keyer = served(made=TokenizerBundle.build(bundle().tokenizer_json, chat_template=TEMPLATE, media=spec))
    data, video = picture(1, size), WRITTEN.replace(PAD, "<|video_pad|>")
    learnt(keyer, data)
    for text, start, items in (
        (f"see {WRITTEN} and {video}!", ids_of(f"see {WRITTEN} and <|vision_start|>", [item(data, COUNT)]), [data]),
        (f"see {video} and {WRITTEN}", ids_of("see <|vision_start|>", []), [data]),
        (f"see {video}", ids_of("see <|vision_start|>", []), []),
    ):
        body = {"text": text, "image_data": [*map(url, items)] or None, "video_data": url(picture(2, size))}
        assert routed(registry, body, "/generate", large=large).key == KEYS.block_key(start), text


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_recordings_are_keyed_in_every_form(large: bool) -> None:
    spec = MediaSpec({"audio": PAD}, PROCESSOR)
    template = TEMPLATE.replace("'image'", "'audio'")
    made = TokenizerBundle.build(bundle().tokenizer_json, chat_template=template, media=spec)
    registry, keyer = served(made=made)
    data = picture(1, 3000)
    sound = Item("audio", item_digest("audio", data, PROCESSOR), COUNT)
    assert keyer.media is not None
    keyer.media.learn(sound.digest, COUNT)
    expected = KEYS.block_key(ids_of(rendered([user("hear ", WRITTEN)]), [Item("image", sound.digest, COUNT)]))
    said = base64.b64encode(data).decode()
    for part in (
        {"type": "input_audio", "input_audio": {"data": said, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"DATA:audio/wav;Base64,{said}"}},
        {"type": "audio_url", "audio_url": f"data:;base64,{said}"},
    ):
        assert routed(registry, {"messages": [user("hear ", part)]}, large=large).key == expected, part


def test_pools_without_a_tokenizer_tell_images_apart() -> None:
    registry = ModelRegistry()
    registry.set_endpoint("e", "default", ("vl",), None)
    first, again, other = (
        routed(registry, {"messages": [user("see ", image_part(picture(number)), end)]})
        for number, end in ((1, "?"), (1, "!"), (2, "?"))
    )
    assert first.key is not None
    assert again.key is not None
    assert other.key is not None
    assert first.key.partition(b"?")[0] == again.key.partition(b"!")[0]
    assert first.key != other.key


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_the_native_api_names_images_beside_the_text(large: bool) -> None:
    registry, keyer = served()
    data = picture(1, 3000)
    learnt(keyer, data)
    prompt = f"see {WRITTEN} this"
    expected = KEYS.block_key(ids_of(prompt, [item(data, COUNT)]))
    bare = base64.b64encode(data).decode()
    for images in (url(data), [url(data)], bare, [bare], [[bare]]):
        assert routed(registry, {"text": prompt, "image_data": images}, "/generate", large=large).key == expected
    three = KEYS.block_key(ids_of(prompt * 3, [item(data, COUNT)] * 3))
    for images in ([bare] * 3, [bare, url(data), bare]):
        assert routed(registry, {"text": prompt * 3, "image_data": images}, "/generate", large=large).key == three
    ids = ids_of(prompt.replace(WRITTEN, ""), [])
    assert routed(registry, {"input_ids": ids, "image_data": None}, "/generate", large=large).key == KEYS.block_key(ids)
    remote = routed(registry, {"text": prompt, "image_data": "https://a/b.png"}, "/generate", large=large).key
    assert remote == KEYS.prompt_key("see <|vision_start|>", False), "it is not in the request"


@pytest.mark.parametrize("size", [3, 2000], ids=["tiny", "long"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_a_key_has_a_bounded_number_of_images(size: int, large: bool) -> None:
    """Each takes time of the event loop, however few bytes it has."""
    registry, keyer = served()
    assert keyer.media is not None
    many = [picture(seed, size) for seed in range(MAX_CONTENTS + 3)]
    learnt(keyer, *many)
    images = [base64.b64encode(data).decode() for data in many]
    parts = [one for data in many for one in (image_part(data), text("."))]
    for path, body in (
        (CHAT, {"messages": [user(*parts)]}),
        (CHAT, {"messages": [user(one) for one in parts]}),
        ("/generate", {"text": (WRITTEN + ".") * len(many), "image_data": images}),
    ):
        found = routed(registry, body, path, large=large)
        assert found.key is not None
        names = [keyed for data in many if (keyed := item_key(item(data, COUNT).digest, COUNT)) in found.key]
        assert len(names) <= MAX_CONTENTS
        assert PAD_KEY not in found.key, "no image is taken for a text"
        assert found.key_tokens_estimate is not None
        assert (len(names) == MAX_CONTENTS) or large


def test_texts_that_look_like_images_stay_texts() -> None:
    registry, _ = served()
    long = "A" * 5000
    for body in ({"prompt": long}, {"prompt": f"data is {url(picture(1, 3000))}"}, {"prompt": "see " + WRITTEN}):
        expected = KEYS.prompt_key(body["prompt"], True)
        assert routed(registry, body, "/v1/completions").key == expected
        assert routed(registry, body, "/v1/completions", large=True).key == expected
    forged = image_part(b"")
    forged["image_url"]["url"] += "#" + "zz" * 32
    assert routed(registry, {"messages": [user(forged)]}).key is not None


def test_a_large_image_holds_the_loop_for_a_moment_only() -> None:
    """A turn of a body of eight images is a fraction of reading it at once."""
    parts = [image_part(picture(number, MB)) for number in range(8)]
    body = json.dumps({"model": "vl", "messages": [user(*parts)]}).encode()
    pieces = Body([body])
    outline = Outline()
    for one in pieces.pieces():
        outline.feed(one)
    outline.finish(pieces)
    longest, began = 0.0, time.thread_time()
    for _ in hash_contents(pieces, outline):
        longest = max(longest, time.thread_time() - began)
        began = time.thread_time()
    assert len(outline.contents) == 8
    assert longest < 15 * reference_s()
