"""Videos become what transformers' processors make of them, and hostile ones are refused before they are decoded."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from support.media import Decoder, make_media_checkpoint
from support.videos import decoded, video
from treeline_runtime.media import videos as module
from treeline_runtime.media.protocol import Refused
from treeline_runtime.media.settings import read_settings
from treeline_runtime.media.videos import Videos
from treeline_runtime.server.errors import ApiError

SECONDS = 10
PIXELS = 1 << 20
KINDS = ("Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor")
SETTINGS: dict[str, dict[str, Any]] = {
    KINDS[0]: {"do_sample_frames": True, "fps": 2, "size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 6}},
    KINDS[1]: {"size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 40}},
}


def processor(folder: Path, kind: str, **more: Any) -> Videos:
    settings = {"video_processor_type": kind, **SETTINGS[kind], **more}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return Videos(str(folder), PIXELS, SECONDS)


def reference(kind: str) -> Any:
    pytest.importorskip("torchvision")
    import transformers

    return getattr(transformers, kind)(**SETTINGS[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frames", [2, 5, 23, 64])
@pytest.mark.parametrize(("form", "codec"), [("mp4", "mpeg4"), ("webm", "libvpx"), ("avi", "mpeg4")])
def test_patches_equal_those_of_transformers(kind: str, frames: int, form: str, codec: str, tmp_path: Path) -> None:
    data, theirs = video(frames, form=form, codec=codec), reference(kind)
    made, pixels = processor(tmp_path, kind).read(data, 1 << 20)
    metadata = {"total_num_frames": frames, "fps": 10.0, "duration": frames / 10}
    expected = theirs(videos=[decoded(data)], video_metadata=[metadata], return_tensors="pt")
    assert made.grid == tuple(expected["video_grid_thw"][0].tolist())
    assert made.count * 4 == len(pixels)
    np.testing.assert_allclose(pixels, expected["pixel_values_videos"].numpy(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_sampled_as_the_processor_says(kind: str, tmp_path: Path) -> None:
    theirs = reference(kind)
    from transformers.video_utils import VideoMetadata

    ours = processor(tmp_path, kind)
    for total in range(4, 400, 7):
        for rate in (1.0, 10.0, 23.976, 25.0, 60.0):
            metadata = VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
            assert ours.sampled(total, rate) == theirs.sample_frames(metadata).tolist()


@pytest.mark.parametrize("size", [(28, 28), (140, 56), (97, 333), (600, 64)])
def test_frames_are_scaled_to_the_bit_as_torch_scales_bytes(size: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    image = np.random.default_rng(1).integers(0, 256, (97, 333, 3), np.uint8)
    given = torch.from_numpy(image).permute(2, 0, 1)[None]
    theirs = torch.nn.functional.interpolate(given, size, mode="bicubic", antialias=True)
    assert np.array_equal(module.resized(image, size), theirs[0].permute(1, 2, 0).numpy())


def box(data: bytearray, name: bytes) -> int:
    """Where the content of an MP4's box begins."""
    return data.index(name) + 4


def slow(units: int) -> bytes:
    """A video of few frames, each of which says that it lasts so many units of time."""
    data = bytearray(video(8))
    at = box(data, b"stts") + 12
    data[at : at + 4] = units.to_bytes(4, "big")
    return bytes(data)


def sound() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


HOSTILE: Sequence[tuple[str, Any, str]] = (
    ("nothing", lambda: b"", "known format"),
    ("a picture", lambda: b"\x89PNG\r\n\x1a\n" + bytes(100), "known format"),
    ("a playlist", lambda: b"#EXTM3U\nfile:///etc/passwd\n", "known format"),
    ("a list of files", lambda: b"ffconcat version 1.0\nfile /etc/passwd\n", "known format"),
    ("a beginning alone", lambda: b"\0\0\0\x18ftypmp42" + bytes(100), "broken"),
    ("a Matroska file of zeros", lambda: b"\x1aE\xdf\xa3" + bytes(1000), "broken"),
    ("no pictures", sound, "broken"),
    ("its first bytes alone", lambda: video(40, form="webm", codec="libvpx")[:300], "broken"),
    ("no index", lambda: video(40)[:2000], "broken"),
    ("a frame alone", lambda: video(1), "too few"),
    ("more seconds than allowed", lambda: video(101), "longer"),
    ("many frames in few bytes", lambda: video(1300, rate=100, size=(16, 16)), "longer"),
    ("frames of days", lambda: slow(10**9), "longer"),
    ("large frames", lambda: video(2, size=(2048, 1024)), "pixels"),
    ("an extreme shape", lambda: video(4, size=(4096, 16)), "200 times"),
    ("a codec of pictures", lambda: video(4, form="avi", codec="ffv1"), "broken|codec"),
)


@pytest.mark.parametrize(("make", "why"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_a_hostile_video_is_refused(make: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=why):
        processor(tmp_path, KINDS[1]).read(make(), 1 << 20)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"cap_pixels_per_frame": True}, "cap_pixels_per_frame"),
        ({"do_resize": False}, "do_resize"),
        ({"do_normalize": False}, "do_normalize"),
        ({"resample": 2}, "resample"),
        ({"rescale_factor": 1}, "rescale_factor"),
        ({"size": {"longest_edge": None, "height": 9}}, "size"),
        ({"video_processor_type": "LlavaNextVideoProcessor"}, "LlavaNextVideoProcessor"),
    ],
)
def test_settings_that_are_not_obeyed_are_refused_by_name(settings: Any, named: str, tmp_path: Path) -> None:
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({"size": {}} | settings))
    with pytest.raises(ValueError, match=named):
        read_settings(tmp_path)


def test_settings_come_from_where_transformers_finds_them(tmp_path: Path) -> None:
    def write(name: str, content: Any) -> dict[str, Any]:
        (tmp_path / name).write_text(json.dumps(content))
        return read_settings(tmp_path)

    found = write("preprocessor_config.json", {"min_pixels": 3136, "patch_size": 12})
    assert (found["video_processor_type"], found["patch_size"]) == (KINDS[0], 12)
    assert found["size"] == {"shortest_edge": 3136, "longest_edge": 28 * 28 * 768}
    assert write("config.json", {"model_type": "qwen3_vl"})["video_processor_type"] == KINDS[1]
    assert write("video_preprocessor_config.json", {"fps": 3, "patch_size": None})["fps"] == 3
    assert write("processor_config.json", {"video_processor": {"fps": 4}})["fps"] == 4
    with pytest.raises(ValueError, match="Qwen2VLVideoProcessor"):
        write("processor_config.json", {"video_processor": {"video_processor_type": KINDS[0]}})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frames", [5, 23, 64])
def test_times_equal_those_of_transformers(kind: str, frames: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = processor(tmp_path, kind)
    made, _ = ours.read(video(frames), 1 << 20)
    taken = ours.sampled(frames, 10.0)
    metadata = transformers.video_utils.VideoMetadata(total_num_frames=frames, fps=10.0, frames_indices=taken)
    if kind == KINDS[0]:
        assert (made.seconds, made.times) == (pytest.approx(2 / metadata.sampled_fps), ())
    else:
        times = transformers.Qwen3VLProcessor._calculate_timestamps(None, taken[:], 10.0)
        assert (made.seconds, list(made.times)) == (1.0, pytest.approx(times))


@pytest.mark.deep
def test_hostile_videos_never_end_the_process(tmp_path: Path) -> None:
    """In confinement, too, where a decoder that wants more than its memory would end it."""
    model = make_media_checkpoint(tmp_path / "model")
    decode = Decoder(model, kind="video", limit=SECONDS)
    try:
        decode(video(8))
        before = decode.pool.pids()
        whole, rng = video(40), np.random.default_rng(5)
        broken = [bytearray(whole) for _ in range(20)]
        for data in broken:
            for at in rng.integers(0, len(data), 30):
                data[at] = rng.integers(256)
        for data in [make() for _, make, _ in HOSTILE] + [*map(bytes, broken)]:
            with contextlib.suppress(ApiError):
                decode(data)
        assert decode.pool.pids() == before
        assert decode(video(9)).grid[0] == 5
    finally:
        decode.close()


def test_a_video_is_refused_by_its_tokens_before_it_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_frames", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(Refused, match="tokens of the context"):
        processor(tmp_path, KINDS[1]).read(video(40), 3)
