"""Videos through the doors of a server: the scheduler gets items, and what is refused is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from support.media import data_url, encoded, image_part, make_media_checkpoint, pixels, text_part
from support.runtime_server import running
from support.videos import video as make_video
from support.videos import video_part
from treeline_lang import RuntimeEndpoint, Unsupported, assistant, function, gen, image, user, video
from treeline_runtime.messages import GenerateReq
from treeline_wire.media import item_digest
from treeline_wire.tokenizer import TokenizerBundle

SHORT, LONG = make_video(8, rate=4), make_video(50, rate=4)
PICTURE = encoded(pixels(64, 64, 1))
VISION = "<|vision_start|><|{}_pad|><|vision_end|>"
PARAMS = {"max_new_tokens": 2}
PART = "messages[0].content[0]"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_media_checkpoint(tmp_path_factory.mktemp("models") / "media")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seen") / "items"


@pytest.fixture(scope="module")
def http(model: Path, seen: Path) -> Iterator[httpx.Client]:
    environment = {"FAKE_ITEMS": str(seen)}
    limits = ("--max-video-seconds=10", "--max-images=3", "--max-image-pixels=16384")
    with running(model, "--no-events", *limits, fake=True, environment=environment) as made, made.client() as client:
        yield client


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}], "max_tokens": 4, **more}


def got(seen: Path) -> GenerateReq:
    (line,) = seen.read_bytes().splitlines()
    seen.unlink()
    return msgspec.json.decode(line, type=GenerateReq)


def test_a_chat_has_a_video_and_an_image(http: httpx.Client, model: Path, seen: Path) -> None:
    answer = http.post("/v1/chat/completions", json=chat(video_part(SHORT), image_part(PICTURE), text_part("?")))
    assert answer.status_code == 200, answer.text
    request, spec = got(seen), TokenizerBundle.from_dir(model).media
    assert spec is not None
    film, picture = request.items
    assert (film.kind, film.grid, film.count) == ("video", (4, 6, 10), 60)
    assert film.seconds == 0.5
    assert film.digest == item_digest("video", SHORT, spec.fingerprint)
    assert picture.kind == "image"
    assert answer.json()["usage"]["prompt_tokens"] == len(request.input_ids)


def test_the_native_door_takes_both(http: httpx.Client, seen: Path) -> None:
    text = VISION.format("video") + VISION.format("image") + VISION.format("video")
    body = {"text": text, "image_data": data_url(PICTURE), "video_data": [data_url(SHORT), data_url(SHORT)]}
    answer = http.post("/generate", json={**body, "sampling_params": PARAMS})
    assert answer.status_code == 200, answer.text
    assert [item.kind for item in got(seen).items] == ["video", "image", "video"]


def test_a_batch_has_videos_of_each(http: httpx.Client, seen: Path) -> None:
    body = {"text": ["x", VISION.format("video")], "video_data": [None, data_url(SHORT)], "sampling_params": PARAMS}
    assert http.post("/generate", json=body).status_code == 200
    assert [item.kind for item in got(seen).items] == ["video"]


def test_the_model_says_that_it_reads_videos(http: httpx.Client) -> None:
    said = http.get("/get_model_info").json()
    assert said["has_video_understanding"] is True
    assert said["placeholders"] == {kind: VISION.format(kind) for kind in ("image", "video")}


@function
def compares(s: Any, one: bytes, two: bytes) -> None:
    s += user("Look: " + image(one) + "and") + assistant(gen("first", max_tokens=2))
    s += user(image(two) + video(SHORT) + "?") + assistant(gen("second", max_tokens=2))


def test_a_program_shows_images_to_a_runtime(http: httpx.Client, seen: Path) -> None:
    other = encoded(pixels(96, 64, 2))
    with RuntimeEndpoint(str(http.base_url)) as backend:
        state = compares.run(one=PICTURE, two=other, backend=backend, temperature=0)
        assert state["second"]
    vision = VISION.format("image")
    assert f"<|im_start|>user\nLook: {vision}and<|im_end|>" in state.text()
    *_, last = (msgspec.json.decode(line, type=GenerateReq) for line in seen.read_bytes().splitlines())
    assert [item.kind for item in last.items] == ["image", "image", "video"]
    assert last.items[0].digest != last.items[1].digest
    seen.unlink()


@function
def chooses(s: Any) -> None:
    s += user(image(PICTURE) + "?") + assistant(gen("a", choices=["x", "y"]))


def test_a_choice_beside_an_image_is_refused(http: httpx.Client) -> None:
    with RuntimeEndpoint(str(http.base_url)) as backend, pytest.raises(Unsupported, match="log probabilities"):
        chooses.run(backend=backend)["a"]


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", chat(video_part(LONG)), PART, "--max-video-seconds"),
    ("/v1/chat/completions", chat(video_part(make_video(8, size=(160, 112)))), PART, "--max-image-pixels"),
    ("/v1/chat/completions", chat(*[video_part(SHORT)] * 4), PART, "--max-images"),
    ("/v1/chat/completions", chat(video_part(PICTURE)), PART, "known format"),
    ("/v1/chat/completions", chat(video_part(SHORT[:900])), PART, "broken"),
    ("/v1/chat/completions", chat({"video_url": "https://e.org/x.mp4"}), PART, "--allowed-media-domains"),
    ("/v1/chat/completions", chat({"video_url": "file:///x.mp4"}), PART, "never read"),
    ("/v1/chat/completions", chat({**video_part(SHORT), "fps": 3}), f"{PART}.fps", ""),
    ("/v1/chat/completions", chat(video_part(SHORT), mm_processor_kwargs={"fps": 1}), "mm_processor_kwargs", ""),
    ("/generate", {"text": "x", "video_data": data_url(SHORT)}, "text", "placeholders"),
    ("/generate", {"text": VISION.format("video"), "video_data": {"format": "processor_output"}}, "video_data", ""),
    ("/generate", {"text": ["x"], "video_data": data_url(SHORT)}, "video_data", "videos of each"),
]


@pytest.mark.parametrize(("path", "body", "param", "why"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused_is_named(http: httpx.Client, path: str, body: dict[str, Any], param: str, why: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert why in error["message"]


def test_a_model_with_settings_that_are_not_obeyed_reads_images_alone(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"cap_pixels_per_frame": True}))
    environment = {"FAKE_ITEMS": str(tmp_path / "items")}
    with running(folder, "--no-events", fake=True, environment=environment) as made, made.client() as client:
        answer = client.post("/v1/chat/completions", json=chat(video_part(SHORT)))
        assert answer.status_code == 400
        assert "cap_pixels_per_frame" in answer.json()["error"]["message"]
        assert client.post("/v1/chat/completions", json=chat(image_part(PICTURE))).status_code == 200
        said = client.get("/get_model_info").json()
        assert (said["has_image_understanding"], said["has_video_understanding"]) == (True, False)
