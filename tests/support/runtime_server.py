"""Real runtime servers for tests: a tiny random checkpoint, and a `treeline serve` process on free ports."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from support.fake_scheduler import Magic
from support.ports import free_base

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog.",
    "Counting: one two three four five six seven eight nine ten, and so on and on.",
    "system user assistant prompt cache tokens hello world streaming server request answer",
]
CONTEXT = 1024
TESTS = str(Path(__file__).parents[1])
START_S = 240.0


def make_tokenizer(folder: Path) -> int:
    """Write a byte-level BPE tokenizer in Hugging Face's layout; return its vocabulary's size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return int(tokenizer.get_vocab_size())


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


def make_checkpoint(folder: Path, *, seed: int = 0, experts: int = 0) -> Path:
    """Write a random Qwen3 model of a few thousand weights, with tokenizer and chat template. `experts`: in each layer;
    0: it is dense."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = make_tokenizer(folder)
    hidden, inner, layers, heads, kv_heads, head = 32, 64, 2, 4, 2, 8
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocab,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "eos_token_id": SPECIAL.index("<|im_end|>"),
        "bos_token_id": None,
        "torch_dtype": "float32",
    }
    if experts:
        config |= MOE | {"num_experts": experts, "moe_intermediate_size": inner}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "top_k": 50, "top_p": 0.95}))
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Any:
        return (rng.standard_normal((rows, columns)) * 0.2).astype(np.float32)

    weights: dict[str, Any] = {
        "model.embed_tokens.weight": matrix(vocab, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}."
        weights |= {
            name + "input_layernorm.weight": np.ones(hidden, np.float32),
            name + "post_attention_layernorm.weight": np.ones(hidden, np.float32),
            name + "self_attn.q_proj.weight": matrix(heads * head, hidden),
            **{name + f"self_attn.{part}_proj.weight": matrix(kv_heads * head, hidden) for part in "kv"},
            name + "self_attn.o_proj.weight": matrix(hidden, heads * head),
            name + "self_attn.q_norm.weight": np.ones(head, np.float32),
            name + "self_attn.k_norm.weight": np.ones(head, np.float32),
        }
        if experts:
            weights[name + "mlp.gate.weight"] = matrix(experts, hidden)
        for block in [f"mlp.experts.{expert}." for expert in range(experts)] or ["mlp."]:
            for part in ("gate", "up"):
                weights[f"{name}{block}{part}_proj.weight"] = matrix(inner, hidden)
            weights[f"{name}{block}down_proj.weight"] = matrix(hidden, inner)
    save_file(weights, folder / "model.safetensors")
    return folder


class ServerProcess:
    """A `treeline serve` process, its log, and ways to observe and end it."""

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        fake: bool = False,
        module: str = "treeline_runtime",
        environment: dict[str, str] | None = None,
    ) -> None:
        """`fake`: with a scheduler that has no model (support.fake_scheduler), so it starts in a moment. `module`: the
        module that Python runs."""
        ports = [] if "--no-events" in flags else ["--events-port=0", "--replay-port=0", "--load-port=0"]
        named = {flag.partition("=")[0] for flag in flags}
        own = [f"{flag}=0" for flag in ("--port", "--metrics-port", "--admin-port") if flag not in named]
        command = [
            sys.executable,
            "-m",
            "support.fake_serve" if fake else module,
            "--model",
            str(model),
            "--threads=1",
            "--log-format=text",
            *own,
            *ports,
        ]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": TESTS} | (environment or {})
        self.process = subprocess.Popen(
            [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        self.log: list[str] = []
        self._grown = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._grown:
                self.log.append(line.rstrip("\n"))
                self._grown.notify_all()
        with self._grown:
            self.log.append("(end of log)")
            self._grown.notify_all()

    def wait_for_log(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        """Return the first line that matches; fails with the whole log."""
        deadline = time.monotonic() + timeout_s
        with self._grown:
            while True:
                for line in self.log:
                    if found := re.search(pattern, line):
                        return found
                left = deadline - time.monotonic()
                if left <= 0 or (self.log and self.log[-1] == "(end of log)"):
                    raise AssertionError(f"no {pattern!r} in the log:\n" + "\n".join(self.log))
                self._grown.wait(left)

    @property
    def url(self) -> str:
        return self.wait_for_log(r"listening on (http://[^\s\"]+)")[1]

    @property
    def metrics_url(self) -> str:
        return self.wait_for_log(r"metrics on (http://[^\s\"]+)")[1]

    @property
    def admin_url(self) -> str:
        return self.wait_for_log(r"administration on (http://[^\s\"]+)")[1]

    def ready(self) -> ServerProcess:
        self.wait_for_log(r"ready after")
        return self

    def client(self, **kwargs: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **kwargs)

    def metrics(self, **kwargs: Any) -> httpx.Client:
        return httpx.Client(base_url=self.metrics_url, timeout=60, **kwargs)

    def admin(self, **kwargs: Any) -> httpx.Client:
        return httpx.Client(base_url=self.admin_url, timeout=60, **kwargs)

    def children(self) -> dict[str, int]:
        """Return process name → pid, of the server's children."""
        found: dict[str, int] = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                command = " ".join(child.cmdline())  # of a zombie: nothing
                found |= {name: child.pid for name in ("scheduler", "detokenizer", "publisher") if name in command}
        return found

    def children_of_ranks(self, name: str) -> list[int]:
        """Return the pids of one process of every data-parallel rank, in order."""
        found = [child for child in psutil.Process(self.process.pid).children() if name in " ".join(child.cmdline())]
        return [child.pid for child in sorted(found, key=lambda child: (child.create_time(), child.pid))]

    def idle(self) -> bool:
        """Return whether no request runs or waits, and no pages are used."""
        with self.client() as http:
            load = http.get("/v1/loads").json()["loads"][0]
        return bool(load["num_total_reqs"] == 0 and load["pages_used"] == 0)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Return the exit status; fails with the log if the server does not end."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError("the server did not end:\n" + "\n".join(self.log)) from None
        self._reader.join(60)
        return status

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.wait()


@contextlib.contextmanager
def running(model: Path | str, *flags: str, **kwargs: Any) -> Iterator[ServerProcess]:
    """Run a server: ready in the block, stopped after it."""
    server = ServerProcess(model, *flags, **kwargs)
    try:
        yield server.ready()
    finally:
        server.stop()


def port_flags(ranks: int) -> list[str]:
    """Return flags with ports of events, replay and load that are free, for so many ranks each."""
    return [f"{flag}={free_base(ranks)}" for flag in ("--events-port", "--replay-port", "--load-port")]


def eventually(condition: Callable[[], Any], timeout_s: float = 60.0, what: str = "") -> Any:
    """Poll until `condition` holds, and return its value."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what or condition}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Return whether a process has ended (a zombie has)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def sse(response: httpx.Response) -> list[Any]:
    """Read the events of a whole stream, checked to be well-formed; the last is "[DONE]" unless an error ended it.
    Named events have their name as their type."""
    events: list[Any] = []
    text = "".join(response.iter_text())
    assert text.endswith("\n\n")
    for frame in text.removesuffix("\n\n").split("\n\n"):
        named, _, data = frame.rpartition("\n")
        assert data.startswith("data: "), frame
        payload = data.removeprefix("data: ")
        events.append(payload if payload == "[DONE]" else json.loads(payload))
        assert not named or named == f"event: {events[-1]['type']}", frame
    return events


def let_go(url: str) -> None:
    """Let the held runs of the fake scheduler fail now. A stream's headers are sent with its first token: a client that
    has them knows that the server reads the failure separately from that token."""
    body = {"input_ids": [Magic.LET_GO], "sampling_params": {"max_new_tokens": 1}}
    httpx.post(f"{url}/generate", json=body, headers={"x-api-key": "key"}, timeout=60).raise_for_status()


class Stream(threading.Thread):
    """A streaming request in the background: its events, and how it ended."""

    def __init__(self, server: ServerProcess, tokens: int, *, client: httpx.Client | None = None, **body: Any) -> None:
        """`client`: used instead of a new one."""
        super().__init__(daemon=True)
        self.events: list[str] = []
        self.status: int | None = None
        self.began = threading.Event()
        self._url = server.url
        self._client = client
        self._body = {"prompt": "hello world", "max_tokens": tokens, "stream": True, **body}
        self.start()

    def run(self) -> None:
        own = contextlib.nullcontext(self._client) if self._client else httpx.Client(base_url=self._url, timeout=30)
        with (
            own as client,
            client.stream("POST", "/v1/completions", json=self._body) as response,
        ):
            self.status = response.status_code
            with contextlib.suppress(httpx.HTTPError):
                for line in response.iter_lines():
                    if line:
                        self.events.append(line.removeprefix("data: "))
                        self.began.set()
        self.began.set()

    def underway(self) -> Stream:
        assert self.began.wait(60)
        return self

    def ended(self) -> list[str]:
        self.join(60)
        assert not self.is_alive(), "the stream hangs"
        return self.events
