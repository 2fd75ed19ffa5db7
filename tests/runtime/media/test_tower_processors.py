"""Prompts and pictures of Gemma 3 and InternVL are those of the checkpoint's own processor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.media import Decoder, encoded, image_part, output, pixels, text_part
from support.tower_media import make_checkpoint
from treeline_epp.keyers.prompt_keyer import PromptKeyer
from treeline_epp.requests.prompts import contents_of, keyed
from treeline_runtime.media.settings import pans
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.prompts import Prompts
from treeline_wire.dialects import TREELINE
from treeline_wire.dialects.media_parts import bytes_of
from treeline_wire.media import Item, item_digest, with_items
from treeline_wire.tokenizer import TokenizerBundle

pytest.importorskip("transformers")

IMAGES = [pixels(40, 40), pixels(90, 31, seed=1), pixels(20, 61, seed=2), pixels(33, 17, seed=3, mode="L")]
Made = tuple[str, Path, Any]


@pytest.fixture(scope="module", params=["Gemma3", "InternVL"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A family, the folder of a checkpoint, and its processor."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, make_checkpoint(request.param, folder)


@pytest.fixture
def decode(made: Made) -> Iterator[Decoder]:
    decoder = Decoder(made[1])
    yield decoder
    decoder.close()


def test_pictures_are_those_of_the_processor(made: Made, decode: Decoder) -> None:
    _, _, processor = made
    for image in IMAGES:
        theirs = processor(images=[image], text=processor.image_token, return_tensors="np")
        stored = decode(encoded(image))
        assert stored.shape == theirs["pixel_values"].shape
        np.testing.assert_array_equal(output(stored), theirs["pixel_values"])
        image_ids = processor.tokenizer.convert_tokens_to_ids(
            "<image_soft_token>" if made[0] == "Gemma3" else "<IMG_CONTEXT>"
        )
        assert stored.count == theirs["input_ids"][0].tolist().count(image_ids)


@pytest.mark.parametrize(("size", "upright"), [((100, 172), 7), ((172, 100), 3)])
def test_tiles_are_those_of_the_image_as_exif_turns_it(
    made: Made, decode: Decoder, size: tuple[int, int], upright: int
) -> None:
    """Of an image that is 1.72 times as wide as high, InternVL makes more than of one that is so high."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(pixels(*size), "JPEG", exif=exif)
    count = 4 * upright if made[0] == "InternVL" else 9
    assert decode(data, most=count).count == count
    processes = {*decode.pool.pids()}
    with pytest.raises(ApiError, match=f"it takes .* tokens of the context, which has room for {count - 1}"):
        decode(data, most=count - 1)
    assert processes.issubset(decode.pool.pids())  # none was replaced


def chat() -> list[dict[str, Any]]:
    first, second, third = (encoded(image) for image in IMAGES[:3])
    return [
        {
            "role": "user",
            "content": [text_part("What is\n"), image_part(first), text_part("\nand "), image_part(second)],
        },
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": [image_part(third), image_part(first), text_part("And this?")]},
    ]


def test_ids_of_a_chat_are_those_of_the_processor(made: Made, decode: Decoder) -> None:
    family, folder, processor = made
    bundle = TokenizerBundle.from_dir(folder)
    prompts = Prompts(bundle)
    ids, parts = prompts.with_media({"messages": chat()})
    items = [item_of(bundle, decode, bytes_of(part.url, part.param)) for part in parts]
    found, starts = with_items(ids, prompts.placeholders, items)
    for item, start in zip(items, starts, strict=True):
        found[start : start + item.count] = [*prompts.placeholders] * item.count
    text = processor.apply_chat_template(shown(chat()), add_generation_prompt=True)
    images = [IMAGES[0], IMAGES[1], IMAGES[2], IMAGES[0]]
    expected = processor(images=images, text=text, add_special_tokens=False, return_tensors="np")
    assert found == expected["input_ids"][0].tolist()
    assert family != "Gemma3" or "\n\n\n" in [prompts.decode([id], skip_special_tokens=False) for id in found]


def test_a_text_that_spells_what_the_template_writes_is_refused_only_with_images(made: Made) -> None:
    family, folder, _ = made
    prompts = Prompts(TokenizerBundle.from_dir(folder))
    spelled = "<start_of_image>" if family == "Gemma3" else "<IMG_CONTEXT>"
    messages = [{"role": "user", "content": [text_part(spelled), image_part(encoded(IMAGES[0]))]}]
    with pytest.raises(ApiError, match=r"2 placeholders .* for 1 items"):
        prompts.with_media({"messages": messages})


def test_a_picker_computes_the_same_key(made: Made, decode: Decoder) -> None:
    family, folder, _ = made
    bundle = TokenizerBundle.from_dir(folder)
    keyer = PromptKeyer(bundle)
    assert keyer.keys is not None
    assert keyer.renderer is not None
    assert keyer.media is not None
    prompts = Prompts(bundle)
    ids, parts = prompts.with_media({"messages": chat()})
    items = [item_of(bundle, decode, bytes_of(part.url, part.param)) for part in parts]
    expected = keyer.keys.block_key(with_items(ids, prompts.placeholders, items)[0])
    prompt = keyer.renderer.whole({"messages": chat()}, TREELINE)
    assert prompt is not None
    contents = contents_of([part.url for part in parts])
    first = keyed(prompt, keyer, None, contents)
    assert first.key is not None
    if family == "Gemma3":  # all images have as many tokens
        assert first.key == expected
    else:
        before = expected.index(b"What is")
        assert first.key[:before] == expected[:before]
        assert len(first.key) < len(expected)
        for item in items:
            keyer.media.learn(item.digest, item.count)
        assert keyed(prompt, keyer, None, contents).key == expected


def test_pan_and_scan_is_refused_by_name(tmp_path: Path) -> None:
    make_checkpoint("Gemma3", tmp_path)
    settings = tmp_path / "processor_config.json"
    assert not pans(tmp_path)
    given = json.loads(settings.read_text())
    given["image_processor"]["do_pan_and_scan"] = True
    settings.write_text(json.dumps(given))
    assert pans(tmp_path)


def shown(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as templates get them."""
    return [
        {
            **message,
            "content": [{"type": "image"} if part["type"] == "image_url" else part for part in message["content"]]
            if isinstance(message["content"], list)
            else message["content"],
        }
        for message in messages
    ]


def item_of(bundle: TokenizerBundle, decode: Decoder, data: bytes | None) -> Item:
    assert data is not None
    assert bundle.media is not None
    return Item("image", item_digest("image", data, bundle.media.fingerprint), decode(data).count)
