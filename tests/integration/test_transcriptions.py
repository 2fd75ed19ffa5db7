"""A real server with a small Qwen3-ASR, asked by the openai client: what it writes down is what transformers does."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch
from support.runtime_models import SIZES, save
from support.runtime_server import ServerProcess, make_checkpoint, running
from tokenizers import AddedToken, Tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.deep]
transformers = pytest.importorskip("transformers")

NAMES = ("<|audio_start|>", "<|audio_end|>", "<|audio_pad|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'audio' %}"
    "<|audio_start|><|audio_pad|><|audio_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% if not (loop.last and continue_final_message) %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENCODER = {
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "downsample_hidden_size": 8,
    "output_dim": 64,
}
RATE = 16000


def make_model(folder: Path) -> Any:
    """Write a model with tokenizer and processor, and return transformers' model of the same weights."""
    make_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in NAMES])
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    config = transformers.Qwen3ASRConfig(
        text_config=SIZES
        | {"head_dim": 16, "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 2048}
        | {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
        audio_config=ENCODER,
        audio_token_id=tokenizer.token_to_id("<|audio_pad|>"),
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3ASRForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "audio_tower" in name or "projector" in name:
                parameter.mul_(6)
    save(model, folder)
    transformers.Qwen3ASRFeatureExtractor().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id("<|im_end|>")}))
    return model


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path, ServerProcess]]:
    folder = tmp_path_factory.mktemp("asr") / "model"
    model = make_model(folder)
    with running(folder, "--dtype", "float32", "--max-audio-seconds", "20") as server:
        yield model, folder, server


def noise(seconds: float, seed: int = 0) -> npt.NDArray[np.int16]:
    return (np.random.default_rng(seed).normal(size=int(seconds * RATE)) * 3000).astype(np.int16)


def encoded(samples: npt.NDArray[np.int16], form: str, codec: str, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.layout = "mono"  # type: ignore[union-attr]
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = rate
        for resampled in [*av.AudioResampler(format=stream.format.name, layout="mono", rate=rate).resample(frame)]:  # type: ignore[union-attr]
            for packet in stream.encode(resampled):  # type: ignore[union-attr]
                container.mux(packet)
        for packet in stream.encode(None):  # type: ignore[union-attr]
            container.mux(packet)
    return file.getvalue()


def expected(model: Any, folder: Path, samples: npt.NDArray[np.int16], text: str, tokens: int) -> str:
    """What transformers generates after this prompt, with its own processor."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made = transformers.Qwen3ASRFeatureExtractor()(
        [samples.astype(np.float32) / 32768],
        sampling_rate=RATE,
        padding=True,
        return_attention_mask=True,
        return_tensors="pt",
    )
    pad = tokenizer.token_to_id("<|audio_pad|>")
    frames = int(made["attention_mask"].sum())
    count = frames // 100 * 13 + -(-(frames % 100) // 8)
    ids = []
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        ids += [token] * (count if token == pad else 1)
    with torch.inference_mode():
        out = model.generate(
            input_ids=torch.tensor([ids]),
            input_features=made["input_features"],
            input_features_mask=made["attention_mask"],
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        )
    found: str = tokenizer.decode(out[0, len(ids) :].tolist())
    return found


SOUND = "<|audio_start|><|audio_pad|><|audio_end|>"


def test_transcriptions_are_those_of_transformers(served: tuple[Any, Path, ServerProcess]) -> None:
    model, folder, server = served
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    name, samples = client.models.list().data[0].id, noise(2.3)
    wav = encoded(samples, "wav", "pcm_s16le")
    chat = f"<|im_start|>system\nAda\n<|im_end|>\n<|im_start|>user\n{SOUND}<|im_end|>\n<|im_start|>assistant\n"
    prompts = {
        "": (chat.replace("Ada\n", "Ada"), {"prompt": "Ada"}),
        "en": (f"<|im_start|>user\n{SOUND}<|im_end|>\n<|im_start|>assistant\nlanguage English<asr_text>", {}),
    }
    for language, (text, more) in prompts.items():
        given: dict[str, Any] = {"model": name, "file": ("a.wav", wav), **more}
        if language:
            given["language"] = language
        whole = client.audio.transcriptions.create(**given)
        assert whole.text.startswith(expected(model, folder, samples, text, 8))
        assert whole.text
        events = list(client.audio.transcriptions.create(**given, stream=True))
        assert "".join(event.delta for event in events[:-1]) == whole.text == events[-1].text
        assert {event.type for event in events[:-1]} == {"transcript.text.delta"}
        assert events[-1].usage.input_tokens == whole.usage.input_tokens
        assert client.audio.transcriptions.create(**given, response_format="text").strip() == whole.text.strip()


@pytest.mark.parametrize(
    ("form", "codec", "rate"),
    [("wav", "pcm_s16le", 44100), ("flac", "flac", 16000), ("mp3", "libmp3lame", 16000), ("ogg", "libopus", 48000)],
)
def test_formats_and_rates(form: str, codec: str, rate: int, served: tuple[Any, Path, ServerProcess]) -> None:
    _, _, server = served
    recording = encoded(noise(1.0), form, codec, rate)
    with server.client() as http:
        answer = http.post("/v1/audio/transcriptions", files={"file": recording}, data={"language": "German"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["type"] == "tokens"


def test_chats_may_have_recordings(served: tuple[Any, Path, ServerProcess]) -> None:
    model, folder, server = served
    samples = noise(1.5, seed=4)
    text = f"<|im_start|>user\n{SOUND}Who speaks?<|im_end|>\n<|im_start|>assistant\n"
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    import base64

    sound = {"data": base64.b64encode(encoded(samples, "wav", "pcm_s16le")).decode(), "format": "wav"}
    parts = [{"type": "input_audio", "input_audio": sound}, {"type": "text", "text": "Who speaks?"}]
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": parts}],  # type: ignore[list-item,misc]
        temperature=0,
        max_tokens=8,
    )
    assert answer.choices[0].message.content == expected(model, folder, samples, text, 8)


def test_the_server_says_that_it_reads_recordings_and_no_images(served: tuple[Any, Path, ServerProcess]) -> None:
    with served[2].client() as http:
        said = http.get("/get_model_info").json()
    assert (said["has_image_understanding"], said["has_audio_understanding"]) == (False, True)


HLS = b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile:///etc/passwd\n"


@pytest.mark.parametrize(
    ("recording", "fields", "named"),
    [
        (HLS, {}, "file"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", {}, "file"),
        (b"RIFF\xff\xff\xff\xffWAVEfmt ", {}, "file"),
        (b"ID3" + bytes(100), {}, "file"),
        (b"\x00\x00\x00\x18ftypmp42" + bytes(64), {}, "file"),
        (b"\x1aE\xdf\xa3" + b"\xff" * 200, {}, "file"),
        (b"", {}, "file"),
        (encoded(noise(21), "wav", "pcm_s16le"), {}, "file"),
        (encoded(noise(1), "wav", "pcm_s16le"), {"language": "tlh"}, "language"),
        (encoded(noise(1), "wav", "pcm_s16le"), {"language": ["en", "de"]}, "language"),
        (encoded(noise(1), "wav", "pcm_s16le"), {"temperature": "hot"}, "temperature"),
        (encoded(noise(1), "wav", "pcm_s16le"), {"response_format": "srt"}, "response_format"),
        (encoded(noise(1), "wav", "pcm_s16le"), {"timestamp_granularities[]": "word"}, "timestamp_granularities[]"),
    ],
)
def test_wrong_forms_name_the_field(
    recording: bytes, fields: dict[str, str | list[str]], named: str, served: tuple[Any, Path, ServerProcess]
) -> None:
    _, _, server = served
    with server.client() as http:
        answer = http.post("/v1/audio/transcriptions", files={"file": recording}, data=fields)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == named
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"--x\r\n",
        b"--" + b"x" * 100,
        b"--x\r\n\r\n" * 500,
        b"--x\r\nContent-Disposition: form-data\r\n\r\n1",
    ],
)
def test_what_is_no_form_is_refused(body: bytes, served: tuple[Any, Path, ServerProcess]) -> None:
    _, _, server = served
    with server.client() as http:
        head = {"content-type": "multipart/form-data; boundary=x"}
        answer: httpx.Response = http.post("/v1/audio/transcriptions", content=body, headers=head)
    assert answer.status_code == 400, answer.text
