"""The command line from outside: its commands, its help, its errors."""

import importlib
import re
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest
from treeline.main import WORDS, main


def status_of(*words: str) -> int:
    try:
        return main([*words])
    except SystemExit as ended:
        return int(ended.code or 0)


def test_without_a_command_the_module_prints_help_and_fails():
    answer = subprocess.run(
        [sys.executable, "-m", "treeline"], capture_output=True, text=True, timeout=240, check=False
    )
    assert answer.returncode == 2
    assert all(word in answer.stderr for word in WORDS)


def test_help_names_every_command(capsys):
    assert status_of("--help") == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in WORDS)


@pytest.mark.parametrize("word", WORDS)
def test_every_command_has_help(word, capsys):
    assert status_of(word, "--help") == 0
    assert f"treeline {word}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [[], *([word] for word in WORDS), ["pick", "explain"], ["operate", "plan"], ["bench", "serving"], ["sim", "run"]],
)
def test_help_has_an_example(words, capsys):
    assert status_of(*words, "--help") == 0
    shown = capsys.readouterr().out
    assert re.search(rf"(?im)^examples?:.*treeline {' '.join(words)}", shown, re.DOTALL)


def test_a_mistyped_command_is_answered_with_the_intended_one(capsys):
    assert status_of("sreve", "m") == 2
    assert "did you mean serve?" in capsys.readouterr().err
    assert status_of("bench", "servng") == 2
    assert "did you mean serving?" in capsys.readouterr().err
    assert status_of("--versoin") == 2
    assert "did you mean --version?" in capsys.readouterr().err


def test_the_help_of_the_command_loads_no_room():
    """The help appears at once, however large the rooms are."""
    program = (
        "import sys; from treeline.main import parser; parser().format_help();"
        "print(sorted(name for name in sys.modules if name.startswith(('treeline_', 'rich', 'httpx', 'asyncio'))))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    assert answer.stdout == "['treeline_wire', 'treeline_wire.command_line']\n"


def test_a_closed_pipe_causes_no_traceback(tmp_path):
    pool = tmp_path / "pool.yaml"
    pool.write_text(
        "apiVersion: treeline.dev/v1alpha1\nkind: InferencePool\nmetadata: {name: p}\n"
        'spec: {model: {uri: "builtin://tiny"}}\n'
    )
    plan = [sys.executable, "-m", "treeline", "operate", "plan", "-f", str(pool)]
    with subprocess.Popen(plan, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE


def test_an_unknown_command_is_refused_with_the_known_ones(capsys):
    assert status_of("sreve") == 2
    assert "serve" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "absent", "needs"),
    [
        ("serve", ["treeline_runtime"], "the runtime: pip install 'treeline-llm[runtime]'"),
        ("up", ["treeline_epp"], "the picker: pip install 'treeline-llm[picker]'"),
        ("pick", ["treeline_epp"], "the picker: pip install 'treeline-llm[picker]'"),
        ("operate", ["treeline_operator"], "the operator: pip install 'treeline-llm[operator]'"),
        ("sim", ["treeline_bench"], "the benchmarks: pip install 'treeline-llm[bench]'"),
        ("bench", ["treeline_bench.cli"], "the benchmarks: pip install 'treeline-llm[bench]'"),
    ],
)
def test_a_command_whose_package_is_missing_says_what_to_install(word, absent, needs, monkeypatch, capsys):
    for package in absent:
        monkeypatch.setitem(sys.modules, package, None)
    assert main([word]) == 1
    assert capsys.readouterr().err == f"treeline {word}: this needs {needs}\n"


def test_a_part_without_its_dependencies_is_missing_though_its_package_is_there(monkeypatch, capsys):
    def main(_argv):
        raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")

    module = importlib.import_module(WORDS["serve"].module)
    monkeypatch.setattr(module, "main", main)
    assert status_of("serve") == 1
    assert capsys.readouterr().err == "treeline serve: this needs the runtime: pip install 'treeline-llm[runtime]'\n"


@pytest.mark.parametrize("words", [["up"], ["sim", "serve"]])
def test_without_the_tiny_model_serve_names_its_package_and_asks_for_a_model(words, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "treeline_tiny", None)
    assert status_of(*words) != 0
    told = " ".join(capsys.readouterr().err.split())
    assert "the tiny model is not installed: pip install" in told
    assert "name a model" in told or "--model" in told


def test_commands_without_dependencies_run_without_extras():
    """The environment after `pip install treeline-llm` without extras."""
    absent = ("runtime", "epp", "operator", "kube", "lang", "bench", "sim", "conformance", "tiny")
    packages = [f"treeline_{name}" for name in absent]
    program = (
        f"import sys; sys.modules |= dict.fromkeys({packages}); from treeline.main import main; main(sys.argv[1:])"
    )
    for words, shown in (
        (["--help"], "doctor"),
        (["version"], "treeline "),
        (["doctor"], "treeline-llm[runtime,picker]"),
    ):
        command = [sys.executable, "-c", program, *words]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert shown in answer.stdout, answer.stderr


def test_an_interrupt_while_a_command_loads_causes_no_traceback(monkeypatch):
    def interrupted(_module):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["pick"]) == 130


@pytest.mark.parametrize("words", [["version"], ["--version"]])
def test_the_version_is_printed(words, capsys):
    assert main(words) == 0
    assert capsys.readouterr().out == f"treeline {version('treeline-llm')}\n"


def test_versions_of_dependencies_are_printed_on_request(capsys):
    assert main(["version", "--all"]) == 0
    assert "grpcio 1." in capsys.readouterr().out


def test_the_operator_plans_a_file_without_torch_or_the_picker(tmp_path):
    """Its image has neither of the other rooms."""
    file = tmp_path / "pool.yaml"
    file.write_text(
        "{apiVersion: treeline.dev/v1alpha1, kind: InferencePool, metadata: {name: a}, spec: {model: {uri: 'builtin://tiny'}}}"
    )
    program = (
        "import sys; from treeline.main import main; status = main(sys.argv[1:]);"
        "sys.exit(status or any(name in sys.modules for name in ('torch', 'treeline_epp', 'treeline_runtime')))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, "operate", "plan", "-f", str(file), "-o", "yaml"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert "kind: Deployment" in answer.stdout


def test_the_picker_does_not_load_torch():
    """Its image has none; nor may the command that starts it."""
    program = "import sys, treeline.main, treeline_epp.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=240, check=False).returncode == 0


@pytest.mark.parametrize("word", WORDS)
def test_a_wrong_flag_is_answered_in_three_lines(word, capsys):
    assert status_of(word, "--no-such-flag") == 2
    hint, error, help = capsys.readouterr().err.splitlines()
    assert hint.startswith(f"usage: treeline {word}")
    assert error.startswith(f"treeline {word}: error: ")
    assert help == f"Try 'treeline {word} --help'."


@pytest.mark.parametrize("words", ["version", "--help", "serve --help", "version --help"])
@pytest.mark.parametrize(
    ("to", "said"),
    [
        (">&-", "treeline: standard output is closed: send it to a file, or to /dev/null\n"),
        (">/dev/full", "treeline: cannot write to standard output: No space left on device\n"),
    ],
)
def test_an_output_that_takes_nothing_is_one_line_and_status_1(words, to, said):
    line = f'exec "{sys.executable}" -m treeline {words} {to}'
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize(
    "words", ["up", "serve", "size", "pick", "pick explain", "operate", "operate plan", "doctor", "version"]
)
def test_help_loads_no_server_and_no_framework(words):
    heavy = {"torch", "fastapi", "httpx", "kubernetes", "grpc", "transformers"}
    program = (
        "import contextlib, sys; from treeline.main import main\n"
        "with contextlib.suppress(SystemExit): main([*sys.argv[1:], '--help'])\n"
        f"print(sorted({heavy} & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert f"treeline {words}" in done.stdout
    assert done.stderr == "[]\n"
