"""Measures a server of a model that reads images, with random weights: its encoder, and what a shared image saves.

    python runtime/benchmarks/media.py --shape qwen3vl8b
    python runtime/benchmarks/media.py --shape qwen3vl8b --vllm-path /opt/vllm/site-packages

Prints a row of JSON for each figure:

- `media.images_s`: images a second, each asked about once, none twice, with an answer of one token: decoded, scaled,
  encoded and computed. 1,000 images of 448 x 448 pixels by default, as JPEG, 64 requests at once, by HTTP.
- `media.vs_vllm`: the same ÷ vLLM's, which gets the decoded images in one call.
- `media.paper`: seconds of questions about shared images, each with a cache of its own ÷ in one cache. Some images of
  1,024 x 1,024 pixels, 24 questions about each, answers of 16 tokens: LLaVA's case in the paper of RadixAttention
  (https://arxiv.org/abs/2312.07104, section 6).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dummy_model import tokenizer, word
from engine import report
from PIL import Image
from server import serving
from tokenizers import AddedToken

SPECIAL = ("<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endfor %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 1 << 16, "longest_edge": 1 << 24},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiny": (
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000},
        {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
        | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    ),
    "qwen3vl8b": (
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
        {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096}
        | {"num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]},
    ),
}
"""Settings of decoder and encoder."""
QUESTIONS, ANSWER, AT_ONCE = 24, 16, 64
CONTEXT = 8192


def write_model(folder: Path, shape: str) -> None:
    text, encoder = SHAPES[shape]
    vocab, half = text["vocab_size"], text["head_dim"] // 2
    sections = [half - 2 * (half * 5 // 16), half * 5 // 16, half * 5 // 16]
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections, "mrope_interleaved": True}
    ids = {name: vocab - len(SPECIAL) + i for i, name in enumerate(SPECIAL)}
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text
        | {"model_type": "qwen3_vl_text", "rope_parameters": rope, "max_position_embeddings": 1 << 15}
        | {"rms_norm_eps": 1e-6, "hidden_act": "silu", "dtype": "bfloat16"},
        "vision_config": encoder
        | {"model_type": "qwen3_vl", "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
        | {"in_channels": 3, "hidden_act": "gelu_pytorch_tanh"},
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    words = tokenizer(vocab - len(SPECIAL))
    words.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    words.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": config,
        "preprocessor_config.json": PROCESSOR | {"processor_class": "Qwen3VLProcessor"},
        "video_preprocessor_config.json": PROCESSOR | {"video_processor_type": "Qwen3VLVideoProcessor"},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"},
        "generation_config.json": {"eos_token_id": ids["<|im_end|>"]},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def pictures(count: int, size: int, seed: int) -> list[bytes]:
    """JPEGs of soft noise, as large as those of photographs."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        file = io.BytesIO()
        noise = Image.fromarray(rng.integers(0, 256, (size // 8, size // 8, 3), np.uint8))
        noise.resize((size, size), Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
        found.append(file.getvalue())
    return found


def question(rng: random.Random, length: int = 24) -> str:
    return "".join(f" {word(rng.randrange(2, 900))}" for _ in range(length))


def body(image: bytes, text: str, answer: int, salt: str | None = None) -> bytes:
    url = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    fields = {"max_tokens": answer, "temperature": 0, "ignore_eos": True} | ({"cache_salt": salt} if salt else {})
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()


async def asked(port: int, bodies: Sequence[bytes]) -> float:
    """Sends all, some at once. → seconds. Raises ValueError where one is not answered."""
    places = asyncio.Semaphore(AT_ONCE)

    async def ask(body: bytes) -> None:
        async with places:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n"
            writer.write(head % len(body) + b"content-type: application/json\r\n\r\n" + body)
            answer = await reader.read()
            writer.close()
            if not answer.startswith(b"HTTP/1.1 200"):
                raise ValueError(f"the server answered {answer[:500]!r}")

    began = time.perf_counter()
    await asyncio.gather(*map(ask, bodies))
    return time.perf_counter() - began


async def ours(port: int, count: int, shared: int, rounds: int) -> float:
    """→ images a second; reports the rest."""
    rng = random.Random(0)
    await asked(port, [body(image, question(rng), 1) for image in pictures(AT_ONCE, 448, seed=-1 & 0xFFFF)])
    seconds = await asked(port, [body(image, question(rng), 1) for image in pictures(count, 448, seed=1)])
    ratios = []
    for round_ in range(rounds + 1):
        images = pictures(shared, 1024, seed=100 + round_)
        pairs = [(image, question(rng)) for image in images for _ in range(QUESTIONS)]
        apart = await asked(port, [body(*pair, ANSWER, f"{round_}-{i}") for i, pair in enumerate(pairs)])
        ratios.append(apart / await asked(port, [body(*pair, ANSWER) for pair in pairs]))
    report("media.paper", statistics.median(ratios[1:]))
    return count / seconds


def theirs(folder: Path, count: int) -> float:
    """→ images a second by vLLM."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        str(folder), load_format="dummy", dtype="bfloat16", max_model_len=CONTEXT, max_num_seqs=AT_ONCE * 4,
        gpu_memory_utilization=0.85, limit_mm_per_prompt={"image": 1, "video": 0},
    )  # fmt: skip
    rng = random.Random(0)

    def seconds(files: list[bytes]) -> float:
        images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
        prompts = [
            {
                "prompt": f"<|vision_start|><|image_pad|><|vision_end|>{question(rng)}",
                "multi_modal_data": {"image": image},
            }
            for image in images
        ]
        began = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0.6, max_tokens=1, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - began

    seconds(pictures(AT_ONCE, 448, seed=2))
    return count / seconds(pictures(count, 448, seed=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-path", metavar="DIR", help="where vLLM is installed; compares with it")
    parser.add_argument("--quick", action="store_true", help="few images, one round: proves that it works")
    parser.add_argument("--by-vllm", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    count, shared, rounds = (24, 2, 1) if args.quick else (args.images, 4, args.rounds)
    if args.by_vllm:
        (args.by_vllm / "rate").write_text(str(theirs(args.by_vllm, count)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, args.shape)
        settings = {"context_length": CONTEXT}
        with serving(folder, settings, "treeline_runtime", {}) as server:
            try:
                rate = asyncio.run(ours(server.port, count, shared, rounds))
            except ValueError as error:
                raise SystemExit(f"{error}\n{(folder / 'server.log').read_text()[-3000:]}") from None
        report("media.images_s", rate)
        if args.vllm_path:
            environment = os.environ | {"PYTHONPATH": args.vllm_path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
            command = [sys.executable, __file__, *sys.argv[1:], "--by-vllm", name]
            with (folder / "vllm.log").open("w") as log:
                code = subprocess.run(command, stdout=log, stderr=log, env=environment).returncode
            if code:
                raise SystemExit(f"vLLM ended with status {code}:\n{(folder / 'vllm.log').read_text()[-3000:]}")
            report("media.vs_vllm", rate / float((folder / "rate").read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
