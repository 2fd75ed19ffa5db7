"""`treeline size` as its user sees it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.fake_hub import FakeRepo, running_hub
from treeline.main import main
from treeline.size.source import INDEX

CONFIGS = Path(__file__).parents[2] / "runtime" / "models" / "configs"
TINY = Path(__file__).parents[3] / "models" / "tiny"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    def of(name: str) -> Path:
        made = tmp_path / name
        made.mkdir(exist_ok=True)
        (made / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
        return made

    return of  # type: ignore[return-value]


def size(*words: object) -> int:
    try:
        return main(["size", *map(str, words)])
    except SystemExit as ended:
        return int(ended.code or 0)


def as_json(capsys, *words: object) -> dict:
    size(*words, "--json")
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["tiny", TINY, TINY / "config.json"])
def test_the_tiny_model_is_counted(name, capsys):
    found = as_json(capsys, name)
    assert found["parameters"] == sum(part["parameters"] for part in found["parts"]) == 6_557_696
    assert found["stored_bytes"] == (TINY / "model.safetensors").stat().st_size
    assert {one["gpu"] for one in found["gpus"]} >= {"h100", "h200", "b200", "a100-80", "a100-40", "l40s", "l4"}


def test_a_table_says_what_fits(folder, capsys):
    assert size(folder("Llama-3.1-8B"), "--gpu", "h200", "--context", 8192) == 0
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM, 131,072 positions" in shown
    assert re.search(r"^all +8\.03 B +7\.50 B +15\.0 GiB$", shown, re.MULTILINE)
    assert "128 KiB a token, 1.0 GiB for a sequence of 8,192 tokens" in shown
    assert re.search(r"^h200 +139\.8 +\d{3},\d{3} +\d+ ", shown, re.MULTILINE)
    assert "Speeds are estimates" in shown


def test_the_table_fits_into_80_columns(folder, capsys):
    flags = ("--requests-per-s", 5, "--concurrency", 100, "--context", 8192)
    assert size(folder("Llama-3.1-70B"), "--quantization", "fp8", *flags) == 0
    shown = capsys.readouterr().out
    rows = [line for line in shown.splitlines() if re.match("b200|h200|GPU", line)]
    assert len(rows) == 3
    assert all(len(row) <= 80 and "…" not in row for row in rows)


def test_a_model_that_does_not_fit_fails_with_a_setting_that_would(folder, capsys):
    assert size(folder("Llama-3.1-70B"), "--gpu", "h200") == 1
    shown = capsys.readouterr().out
    assert "It does not fit on one h200: 15.0 GiB are missing." in shown
    assert "With --tp-size 2 it fits on 2 of them." in shown
    assert "It fits on b200. With --quantization fp8 it fits on b200, h200." in shown


def test_gpus_that_share_a_model_hold_a_part_each(folder, capsys):
    path, flags = folder("Llama-3.1-70B"), ("--gpu", "h100", "--context", 8192, "--concurrency", 100)
    one, four, eight = (as_json(capsys, path, *flags, "--tp-size", n)["gpus"][0] for n in (1, 4, 8))
    assert one["weight_bytes"] * 0.25 < four["weight_bytes"] < one["weight_bytes"] * 0.2501
    assert (one["sequences"], one["kv_bytes_per_token"]) == (0, 4 * four["kv_bytes_per_token"])
    assert eight["sequences"] > four["sequences"] > 0
    assert four["gpus_for_concurrency"] == -(-100 // four["sequences"]) * 4
    assert eight["estimate"]["tokens_s_one"] > four["estimate"]["tokens_s_one"]
    assert size(path, "--gpu", "h100", "--context", 8192, "--tp-size", 4, "--count", 8) == 0
    shown = capsys.readouterr().out
    assert "is that of each of 4 GPUs that share the model" in shown
    assert "8 GPUs are 2 replicas" in shown
    assert size(path, "--gpu", "a10", "--tp-size", 2) == 1
    assert "It does not fit on 2 a10: " in capsys.readouterr().out
    assert size(path, "--tp-size", 3) == 1
    assert "has 64 attention heads, which --tp-size 3 does not divide" in capsys.readouterr().err


def test_a_sequence_that_does_not_fit_is_reported_with_the_longest_that_does(folder, capsys):
    assert size(folder("Llama-3.1-8B"), "--gpu", "l4") == 1
    longest = re.search(r"the longest has ([\d,]+) \(--context (\d+)\)", capsys.readouterr().out)
    assert longest is not None
    assert size(folder("Llama-3.1-8B"), "--gpu", "l4", "--context", longest[2]) == 0


def test_gpus_and_replicas_are_counted(folder, capsys):
    path = folder("Llama-3.1-8B")
    found = as_json(capsys, path, "--gpu", "h100", "--context", 8192, "--concurrency", 101)
    [one] = found["gpus"]
    assert one["gpus_for_concurrency"] == -(-101 // one["sequences"])
    flags = ("--gpu", "h100", "--requests-per-s", 20, "--prompt-tokens", 2000, "--output-tokens", 300)
    few, many = (as_json(capsys, path, *flags, "--prefix-share", share)["gpus"][0]["load"] for share in (0.9, 0))
    assert few["replicas"] < many["replicas"]
    assert size(path, *flags, "--context", 4096, "--count", 4) == 0
    shown = capsys.readouterr().out
    assert "4 GPUs are 4 replicas" in shown
    assert f"{many['replicas']} replicas for 20 requests/s, 70% busy" in shown


def test_a_gpu_given_by_size_alone_has_no_speed(folder, capsys):
    path = folder("Llama-3.1-8B")
    [one] = as_json(capsys, path, "--gpu", "48", "--requests-per-s", 5)["gpus"]
    assert (one["gpu"], one["estimate"], one["load"]) == ("48 GiB", None, None)
    size(path, "--gpu", "48", "--requests-per-s", 5)
    assert "Replicas need the GPU's name" in capsys.readouterr().out


def test_an_architecture_that_is_not_served_is_refused_with_those_that_are(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    assert size(tmp_path) == 1
    told = capsys.readouterr().err
    assert told.startswith("treeline size: error: architecture MambaForCausalLM is not supported; supported: Llama")
    assert "GptOssForCausalLM" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["/nowhere"], "there is no folder '/nowhere', and it is no Hugging Face id"),
        (["{folder}", "--context", "200000"], "--context 200000 is more than the model's 131072 positions"),
        (["{folder}", "--mem-fraction", "2"], "mem_fraction"),
        (["{folder}", "--kv-dtype", "fp8_e4m3", "--gpu", "a100-80"], "needs a GPU from Ada on"),
        (["{moe}", "--quantization", "fp8"], "has experts"),
    ],
)
def test_impossible_settings_are_reported(words, told, folder, capsys):
    paths = {"folder": folder("Llama-3.1-8B"), "moe": folder("Mixtral-8x7B")}
    assert size(*(word.format(**paths) for word in words)) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("treeline size: error: ")
    assert told in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    "flags",
    [["--gpu", "h99"], ["--gpu", "0"], ["--gpu", "nan"], ["--count", "0"], ["--context", "x"], ["--prefix-share", "2"],
     ["--requests-per-s", "0"], ["--requests-per-s", "inf"], ["--dtype", "int4"]],
)  # fmt: skip
def test_a_wrong_value_is_answered_with_the_valid_ones(flags, capsys):
    assert size("tiny", *flags) == 2
    assert f"argument {flags[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{", '{"architectures": ["LlamaForCausalLM"]}', '{"architectures": 5}'])
def test_an_invalid_config_is_an_error(text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    assert size(tmp_path) == 1
    assert capsys.readouterr().err.startswith("treeline size: error: ")


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_attention_heads", "num_local_experts"])
@pytest.mark.parametrize("value", [10**30, 10**300, "\x1b[2J", ["\x1b[2J"], -1, 0, None])
def test_an_impossible_value_is_an_error_without_its_escapes(key, value, tmp_path, capsys):
    config = json.loads((CONFIGS / "Mixtral-8x7B.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    assert size(tmp_path) == 1
    told = capsys.readouterr().err
    assert told.startswith("treeline size: error: ")
    assert "\x1b" not in told


def test_an_invalid_index_is_an_error(folder, capsys):
    path = folder("Llama-3.1-8B")
    (path / INDEX).write_text('{"metadata": {"total_size": "much"}}')
    assert size(path) == 1
    assert "total_size is no number of bytes" in capsys.readouterr().err


def test_size_starts_without_torch(folder):
    program = (
        "import sys; from treeline.main import main; main(sys.argv[1:]);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'huggingface_hub', 'treeline_epp')))"
    )
    words = [sys.executable, "-c", program, "size", str(folder("Llama-3.1-8B"))]
    assert subprocess.run(words, capture_output=True, timeout=240, check=False).returncode == 0


def size_from(hub: str, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "treeline", "size", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=env)


def test_from_the_hub_only_the_config_and_the_index_are_fetched(tmp_path):
    files = {
        "config.json": (CONFIGS / "Llama-3.1-8B.json").read_bytes(),
        INDEX: b'{"metadata": {"total_size": 16060522496}, "weight_map": {}}',
        "model-00001-of-00002.safetensors": b"x" * 1000,
        "tokenizer.json": b"{}",
    }
    single = FakeRepo({"config.json": files["config.json"]})
    with running_hub(llama=FakeRepo(files), single=single, bare=FakeRepo({"a": b""})) as hub:
        answer = size_from(hub.url, tmp_path, "org/llama", "--json")
        assert json.loads(answer.stdout)["stored_bytes"] == 16_060_522_496
        assert sorted(set(hub.downloads())) == ["config.json", INDEX]
        assert json.loads(size_from(hub.url, tmp_path, "org/single", "--json").stdout)["stored_bytes"] is None
        for repo, told in {
            "nothing": "is not on the Hub, or is private",
            "bare": "org/bare has no config.json",
        }.items():
            answer = size_from(hub.url, tmp_path, f"org/{repo}")
            assert (answer.returncode, answer.stdout) == (1, "")
            assert told in answer.stderr


@pytest.mark.deep  # the library asks again for half a minute
def test_an_unreachable_hub_is_reported(tmp_path):
    answer = size_from("http://127.0.0.1:9", tmp_path, "org/llama")
    assert answer.returncode == 1
    assert "the Hub cannot be reached" in answer.stderr
