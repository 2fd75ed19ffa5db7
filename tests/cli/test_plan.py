import fcntl
import socket
import tempfile
from pathlib import Path

import pytest
from treeline.up.command import _options
from treeline.up.plan import UpOptions, busy_ports, gateway_url, plan
from treeline.up.run import PROBE, _how_to_try, _sweep, _workplace, envoy_config
from treeline_operator.envoy import Tracing


def children(**options):
    return plan(UpOptions(model="some/model", **options), Path("/bin/envoy"), Path("/tmp/envoy.json"))


def test_one_picker_and_one_envoy_stand_before_the_runtimes_asked_for():
    assert [child.name for child in children(replicas=3)] == [
        "runtime-0",
        "runtime-1",
        "runtime-2",
        "picker",
        "envoy",
    ]


def test_no_two_processes_share_a_port():
    bound = [address for child in children(replicas=8) for address in child.ports.values()]
    assert len(bound) == len(set(bound)) == 8 * 6 + 4 + 1


def test_the_picker_is_told_every_runtime():
    *runtimes, picker, _ = children(replicas=2)
    for runtime in runtimes:
        host, port = runtime.ports["port"]
        assert f"{runtime.name}={host}:{port}" in picker.argv


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_base_moves_all_ports_and_leaves_no_gap(replicas):
    options, _ = _options(["m", "--port-base", "9100", "--replicas", str(replicas)])
    started = plan(options, Path("/bin/envoy"), Path("/tmp/envoy.json"))
    ports = sorted(port for child in started for _, port in child.ports.values())
    assert ports == list(range(9100, 9100 + 5 + 6 * replicas))
    assert (options.port, gateway_url(options)) == (9100, "http://127.0.0.1:9100")


def test_the_gateways_own_port_overrides_the_base():
    assert _options(["m", "--port-base", "9100", "--port", "80"])[0].port == 80


def test_running_engines_get_picker_and_envoy_and_no_runtime_is_started():
    flags = ["--engine", "a=127.0.0.1:8001", "--engine", "b=[fd00::2]:8001,decode"]
    options, _ = _options([*flags, "--", "--tokenizer", "hf://org/name"])
    a, b, picker, envoy = plan(options, Path("/bin/envoy"), Path("/tmp/envoy.json"))
    assert [(one.name, one.argv, one.engine.address, one.after) for one in (a, b)] == [
        ("engine a", (), "127.0.0.1:8001", ("picker",)),
        ("engine b", (), "[fd00::2]:8001", ("picker",)),
    ]
    assert {a.ready_url, b.ready_url} == {"http://127.0.0.1:9004/endpoints"}, "the picker says which it can use"
    assert envoy.after == ("picker", "engine a", "engine b")
    assert {"a=127.0.0.1:8001", "b=[fd00::2]:8001,decode"} <= set(picker.argv)
    assert picker.argv[-2:] == ("--tokenizer", "hf://org/name")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["m"], "MODEL: with --engine no runtime is started: leave it out, or leave out --engine"),
        (["--replicas", "2"], "--replicas: with --engine no runtime is started"),
        (["--served-model-name", "n"], "--served-model-name: with --engine no runtime is started"),
        (["--engine", "a=127.0.0.1:2"], "--engine: name 'a' occurs more than once"),
        (["--engine", "b=example.org:80"], "the host must be an IP address or localhost"),
    ],
)
def test_flags_that_contradict_engines_are_refused(capsys, words, said):
    with pytest.raises(SystemExit):
        _options(["--engine", "a=127.0.0.1:1", *words])
    assert said in capsys.readouterr().err


def test_arguments_for_the_runtimes_reach_every_runtime_and_nobody_else():
    *runtimes, picker, envoy = children(runtime_args=("--max-total-tokens", "4096"))
    assert all(runtime.argv[-2:] == ("--max-total-tokens", "4096") for runtime in runtimes)
    assert "--max-total-tokens" not in (*picker.argv, *envoy.argv)


def test_envoy_waits_for_the_picker_so_that_its_first_request_is_picked():
    assert children()[-1].after == ("picker",)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8080"),
        ("0.0.0.0", "http://127.0.0.1:8080"),
        ("::", "http://[::1]:8080"),
        ("fd00::2", "http://[fd00::2]:8080"),
    ],
)
def test_the_gateway_is_reached_by_an_address_one_can_connect_to(host, url):
    assert gateway_url(UpOptions(model="m", host=host)) == url


def test_a_busy_port_is_named_with_its_use_and_a_free_one_is_not():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        lines = busy_ports(children(replicas=1, port=taken)[-1:])
        assert [line for line in lines if f"port {taken}" in line and "gateway" in line]
    assert not [line for line in busy_ports(children(replicas=1, port=taken)[-1:]) if f"port {taken}" in line]


def test_a_duplicate_or_impossible_port_is_reported():
    lines = busy_ports(children(replicas=2, runtime_port=9002, runtime_metrics_port=65535))
    assert "port 9002 (picker, grpc-port): it is the port of runtime-0, port too" in lines
    assert "port 65536 (runtime-1, metrics-port): there is none beyond 65535" in lines


def test_the_picker_trusts_the_edge_if_the_edge_knows_its_clients():
    assert "--trust-edge" not in children()[-2].argv
    *_, picker, envoy = children(api_keys={"ada": "sk-ada"})
    assert "--trust-edge" in picker.argv
    assert "sk-ada" not in " ".join((*picker.argv, *envoy.argv))


def test_the_picker_serves_the_console_with_prompts_only_if_asked_and_envoy_leads_to_it():
    for show in (False, True):
        options = UpOptions(model="m", show_prompts=show)
        (picker,) = [child for child in plan(options, Path("envoy"), Path("envoy.json")) if child.name == "picker"]
        assert "--console" in picker.argv
        assert ("--show-prompts" in picker.argv) == show
        assert envoy_config(options).console_port == picker.ports["admin-port"][1]


def test_without_the_console_neither_picker_nor_envoy_nor_the_greeting_has_it(capsys):
    options, _ = _options(["model", "--no-console"])
    (picker,) = [child for child in plan(options, Path("envoy"), Path("envoy.json")) if child.name == "picker"]
    assert "--console" not in picker.argv
    assert envoy_config(options).console_port is None
    assert "browser" not in _how_to_try(options)
    assert "curl" in _how_to_try(options)
    assert "/console/" in _how_to_try(_options(["model"])[0])
    with pytest.raises(SystemExit):
        _options(["model", "--no-console", "--show-prompts"])
    assert "--show-prompts: with --no-console no page could show them" in capsys.readouterr().err


def test_readiness_probes_count_for_no_client():
    options = UpOptions(model="m", api_keys={"ada": "sk-of-ada"})
    *_, envoy = plan(options, Path("envoy"), Path("envoy.json"))
    known = envoy_config(options).api_keys
    assert known == {"ada": "sk-of-ada", PROBE: envoy.ready_headers["x-api-key"]}
    assert not envoy_config(UpOptions(model="m")).api_keys


def keys_of(folder: Path, **files: str) -> dict[str, str]:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    return dict(_options(["--model", "some/model", "--api-keys", str(folder)])[0].api_keys)


def test_api_keys_are_read_from_a_folder_with_a_file_for_each_client(tmp_path):
    assert keys_of(tmp_path / "keys", ada="sk-of-ada\n", bob="sk-of-bob") == {
        "ada": "sk-of-ada",
        "bob": "sk-of-bob",
    }


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no file"),
        ({"ada": ""}, "one key"),
        ({"ada": "sk-of-ada\nsk-of-bob"}, "one key"),
        ({"ada": "sk-ada"}, "8 or more printable ASCII"),
        ({"ada": "sk-of ada"}, "8 or more printable ASCII"),
        ({"a b": "sk"}, "no client's name"),
    ],
)
def test_api_keys_that_cannot_be_used_are_refused_with_the_reason(tmp_path, capsys, files, said):
    with pytest.raises(SystemExit):
        keys_of(tmp_path / "keys", **files)
    assert said in capsys.readouterr().err


def test_a_folder_of_keys_that_is_not_there_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        _options(["--model", "m", "--api-keys", str(tmp_path / "nowhere")])
    assert "cannot read" in capsys.readouterr().err


def test_one_flag_makes_all_three_trace_to_the_collector_of_the_variables(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4400")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")
    options, _ = _options(["--model", "m", "--tracing"])
    assert options.tracing == Tracing("127.0.0.1", 4400, 1.0)
    assert envoy_config(options).tracing == options.tracing
    started = plan(options, Path("envoy"), Path("envoy.json"))
    assert [child.name for child in started if "--tracing" in child.argv] == ["runtime-0", "runtime-1", "picker"]
    off, _ = _options(["--model", "m"])
    assert envoy_config(off).tracing is None
    assert not any("--tracing" in child.argv for child in plan(off, Path("envoy"), Path("envoy.json")))


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://collector:4317", "use http://HOST:4317"),
        ("OTEL_TRACES_EXPORTER", "console", "Envoy sends to a collector alone"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote", "there are always_on"),
    ],
)
def test_variables_that_envoy_cannot_follow_are_refused(monkeypatch, capsys, variable, value, said):
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit):
        _options(["--model", "m", "--tracing"])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--log-dir", "/proc/x"], "--log-dir: cannot write to /proc/x (No such file or directory): name a folder"),
        (["--log-dir", __file__], f"--log-dir: cannot write to {__file__} (File exists): name a folder"),
        (["--isolation", "Shared"], "--isolation: without keys there are no clients to keep apart: add --api-keys"),
        (["--host", "gateway.example"], "'gateway.example' is no IP address: give 127.0.0.1, or 0.0.0.0 for all"),
    ],
)
def test_a_flag_that_cannot_work_is_refused_with_what_to_do(capsys, words, said):
    with pytest.raises(SystemExit) as exit:
        _options(["--model", "m", *words])
    assert exit.value.code == 2
    assert said in capsys.readouterr().err


def test_the_name_of_loopback_is_taken_for_its_address():
    assert _options(["--model", "m", "--host", "localhost"])[0].host == "127.0.0.1"


@pytest.mark.parametrize(
    ("address", "said"), [(("192.0.2.1", 8080), "the address is not this machine's"), (("::1", 0), None)]
)
def test_an_unavailable_port_is_explained_in_words(address, said):
    host, port = address
    lines = busy_ports(children(host=host, port=port)[-1:])
    assert lines == ([] if said is None else [f"port {port} on {host} (envoy, gateway): {said}"])


def test_the_next_start_removes_leftovers_of_killed_processes_and_keeps_files_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("dead", "live", "new"):
        (tmp_path / f"treeline-up-{name}").mkdir()
    for name in ("dead", "live"):
        (tmp_path / f"treeline-up-{name}" / "lock").touch()
    with (tmp_path / "treeline-up-live" / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with _workplace() as folder:
            _sweep()
            assert {path.name for path in tmp_path.iterdir()} == {"treeline-up-live", "treeline-up-new", folder.name}
    assert not folder.exists()


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("127.0.0.1", "(chat, load, decisions)"),
        ("::1", "(chat, load, decisions)"),
        ("0.0.0.0", "(chat; load and decisions on this machine alone: http://127.0.0.1:9004/console/)"),
    ],
)
def test_what_is_printed_names_what_the_console_shows_there(host, said):
    printed = _how_to_try(UpOptions(model="/no/such/m", host=host))
    assert f"/console/ {said}" in printed
    assert printed.splitlines()[-1] == "stop: Ctrl-C"
