"""Every command of the guides and of the site's front page is run, and prints what the page shows.

The word behind a block's `sh` says how. Nothing: by bash, in order, in one folder. `server`: it runs while the page is
read. `vllm`: a simulated engine that speaks vLLM's dialect stands in. `cluster`: on a real Kubernetes API. `flags`,
`sglang`: its flags are read by the program's own parser. `install`: tests of the packages do that; the extras exist.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml
from support.control_plane import ControlPlane
from support.engine_parsers import read_by_sglang, read_by_vllm
from support.engine_wheels import COMMAND_LINES, is_there
from support.ports import free_base, free_ports
from support.real_engines.vllm import INSTALLATION
from support.stack import until
from treeline.up.command import parser as up_parser
from treeline_bench.context import BenchmarkError
from treeline_epp.options import options_of
from treeline_epp.picking.policies import ALIASES, POLICIES
from treeline_runtime.args import parse_args

pytestmark = [pytest.mark.integration, pytest.mark.deep]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
KINDS = {"sh", "sh server", "sh vllm", "sh cluster", "sh flags", "sh sglang", "sh install", "text"}
EXTRAS = {"runtime", "cuda", "picker", "operator", "lang", "bench", "all"}
PORTS = (8000, 8001, 8002, 5557, 5558, 5657, 5658)
QWEN = "Qwen/Qwen3-0.6B"


class Block(NamedTuple):
    kind: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = re.finditer(r"^( *)```([^\n`]+)\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(one[2], re.sub(rf"^{one[1]}", "", one[3], flags=re.MULTILINE)) for one in found]


def commands(kind: str) -> list[tuple[str, list[str]]]:
    """Yield the page and words of each command in blocks of a kind."""
    return [
        (page.stem, shlex.split(line))
        for page in PAGES
        for block in blocks(page)
        if block.kind == kind
        for line in block.text.replace("\\\n", " ").splitlines()
    ]


def fits(promised: str, line: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, promised.split("…"))), line) is not None


class Reader:
    """A reader who follows a page in an empty folder outside the repository, on free ports."""

    def __init__(self, folder: Path, kubeconfig: Path | None = None, bin_: Path | None = None) -> None:
        self.folder, self.kubeconfig = folder, kubeconfig
        path = [str(ROOT / ".venv" / "bin"), *([str(bin_)] if bin_ else []), os.environ["PATH"]]
        self.env = os.environ | {"PATH": ":".join(path), "HF_HUB_OFFLINE": "1", "KUBECONFIG": str(kubeconfig or "")}
        for name in ("models", "manifests"):
            (folder / name).symlink_to(ROOT / name)
        self.base = free_base(24)
        self.ports = {8080: self.base, **dict(zip(PORTS, free_ports(len(PORTS)), strict=True))}

    def here(self, text: str) -> str:
        """Return the page's text with this machine's ports, and the tiny model in place of the reader's."""
        tiny = str(ROOT / "models" / "tiny")
        text = text.replace(f"hf://{QWEN}", tiny).replace(QWEN, tiny)
        for port, free in self.ports.items():
            text = re.sub(rf"\b{port}\b", str(free), text)
        return text

    def run(self, text: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.here(text)],
            cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def server(self, words: list[str]) -> Iterator[None]:
        """Run a server until the end of the block; ready when it says so."""
        words = shlex.split(self.here(shlex.join(words)))
        if words[:2] == ["treeline", "up"]:
            words[2:2] = ["--port-base", str(self.base)]
            url = f"http://127.0.0.1:{self.base}/v1/models"
        else:
            if words[:2] == ["treeline", "serve"]:
                words += ["--no-events", "--metrics-port", "off", "--admin-port", "off"]
            url = f"http://127.0.0.1:{words[words.index('--port') + 1]}/v1/models"
        log = self.folder / f"server-{len(list(self.folder.glob('server-*')))}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                words, cwd=self.folder, env=self.env, stdout=file, stderr=file, start_new_session=True
            )
        try:
            until(lambda: self._serves(process, url, log), f"{words} serves", 240, log.read_text)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise

    @staticmethod
    def _serves(process: subprocess.Popen[bytes], url: str, log: Path) -> bool:
        assert process.poll() is None, log.read_text()
        try:
            ready = httpx.get(url.replace("/v1/models", "/health"), timeout=5, trust_env=False)
            models = httpx.get(url, timeout=5, trust_env=False)
        except httpx.HTTPError:
            return False
        return ready.status_code == models.status_code == 200 and bool(models.json()["data"])

    def stand_in(self, words: list[str]) -> list[str]:
        """Return a simulated engine with the ports and the name of a vLLM command."""
        flags = dict(pairwise(words))
        events = json.loads(flags["--kv-events-config"])
        port = {name: events[name].rpartition(":")[2] for name in ("endpoint", "replay_endpoint")}
        return ["treeline", "sim", "serve", "--dialect", "vllm", "--name", flags["--served-model-name"],
                "--port", flags["--port"], "--events-port", port["endpoint"], "--replay-port", port["replay_endpoint"],
                "--load-port", str(free_ports(1)[0])]  # fmt: skip


def follow(reader: Reader, page: Path) -> None:
    """Run the page's blocks in order."""
    printed = ""
    with ExitStack() as running:
        for block in blocks(page):
            kind, _, name = block.kind.partition(" ")
            if kind == "yaml" and name:
                (reader.folder / name).write_text(block.text)
            elif block.kind == "sh" or (block.kind == "sh cluster" and reader.kubeconfig):
                printed = reader.run(block.text)
            elif block.kind in ("sh server", "sh vllm"):
                words = shlex.split(block.text.replace("\\\n", " "))
                running.enter_context(reader.server(words if name == "server" else reader.stand_in(words)))
            elif block.kind == "text":
                shows(printed, block.text)


def shows(printed: str, promised: str) -> None:
    """Check output against the page. If a page asks twice, the second answer must come from the cache."""
    hits = [int(count) for count in re.findall(r"cached.tokens\W+(\d+)", printed)]
    assert not hits or hits[0] == 0 < hits[-1], printed
    lines, promises = printed.splitlines(), promised.splitlines()
    if promises == ["…"]:
        assert lines
        return
    assert len(lines) == len(promises), printed
    for line, promise in zip(lines, promises, strict=True):
        assert fits(promise, line.rstrip()), f"{line!r} is not {promise!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_guide_is_short_and_each_of_its_blocks_is_run(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 80
    for kind in (block.kind for block in blocks(page)):
        assert kind in KINDS or re.fullmatch(r"yaml [\w.]+", kind), f"no test runs a block of {kind!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_guides_commands_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    follow(Reader(tmp_path), page)


@pytest.mark.parametrize("page", [page for page in PAGES if "sh cluster" in page.read_text() and page.stem != "backup"])
def test_a_real_api_server_accepts_the_guides_commands(
    page: Path, tmp_path: Path, control_plane: ControlPlane, namespace: str
) -> None:
    reader = Reader(tmp_path, control_plane.kubeconfig("admin", ("system:masters",), namespace), control_plane._bin)
    for block in blocks(page):
        kind, _, name = block.kind.partition(" ")
        if kind == "yaml" and name:
            (tmp_path / name).write_text(block.text)
        elif block.kind == "sh cluster":
            assert reader.run(block.text)


def test_lost_objects_return_from_the_backup(tmp_path: Path, control_plane: ControlPlane, namespace: str) -> None:
    reader = Reader(tmp_path, control_plane.kubeconfig("admin", ("system:masters",), namespace), control_plane._bin)
    reader.run("kubectl create secret generic hf-token --from-literal=token=abc")
    reader.run("kubectl apply -f manifests/samples/cpu-tiny.yaml -f manifests/samples/vllm.yaml")
    save, restore = (
        block.text for block in blocks(ROOT / "docs" / "guides" / "backup.md") if block.kind == "sh cluster"
    )

    def what_is_there() -> dict[str, Any]:
        listed = json.loads(reader.run("kubectl get tlpool,tlmodel,secret -o json"))["items"]
        return {
            f"{one['kind']}/{one['metadata']['name']}": one.get("spec") or one.get("data")
            for one in listed
            if one["metadata"]["name"] != "kube-root-ca.crt"
        }

    before = what_is_there()
    assert len(before) >= 4
    reader.run(save)
    reader.run("kubectl delete tlpool,tlmodel --all && kubectl delete secret hf-token")
    assert what_is_there() == {}
    reader.run(restore)
    assert what_is_there() == before


@pytest.mark.parametrize(("page", "words"), commands("sh flags"), ids=str)
def test_the_programs_own_parser_takes_the_flags(page: str, words: list[str]) -> None:
    own, _, passed_on = (list(part) for part in _split(words[2:]))
    if words[1] == "pick":
        assert options_of(own)
    elif words[1] == "serve":
        assert parse_args(own)
    else:
        assert words[1] == "up"
        given = up_parser().parse_args(own)
        assert options_of([*(f"--endpoint={one.name}={one.address}" for one in given.engine), *passed_on])


def _split(words: list[str]) -> tuple[list[str], list[str], list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at : at + 1], words[at + 1 :]


def test_vllms_own_parser_takes_the_flags() -> None:
    try:
        python = INSTALLATION.interpreter()
    except BenchmarkError as missing:
        pytest.skip(str(missing))
    read = read_by_vllm(python, *(words[2:] for _, words in commands("sh vllm")))
    assert [one["port"] for one in read] == [8001, 8002]


@pytest.mark.skipif(not is_there(COMMAND_LINES), reason="not there: SGLang's parser (`make engine-wheels`)")
def test_sglangs_own_parser_takes_the_flags() -> None:
    read = read_by_sglang(COMMAND_LINES.folder, *(words[3:] for _, words in commands("sh sglang")))
    assert [one["port"] for one in read] == [30000]


def test_installed_extras_exist() -> None:
    named = [extra for _, words in commands("sh install") for extra in re.findall(r"\[(.*)\]", words[-1])[0].split(",")]
    assert len(named) > 3
    assert set(named) <= EXTRAS


def test_the_guide_names_sgl_routers_policies_correctly() -> None:
    text = (ROOT / "docs" / "guides" / "from-sgl-router.md").read_text()
    row = next(line for line in text.splitlines() if "| the same names |" in line)
    named = [name.removeprefix("--policy ") for name in re.findall(r"`([^`]+)`", row)]
    assert len(named) > 3
    assert set(named) <= {*POLICIES, *ALIASES}


def test_litellms_files_are_yaml_and_end_with_one_deployment() -> None:
    files = {
        block.kind: yaml.safe_load(block.text)
        for block in blocks(ROOT / "docs" / "guides" / "from-litellm.md")
        if block.kind[:4] == "yaml"
    }
    assert [len(file["model_list"]) for file in files.values()] == [2, 1]
