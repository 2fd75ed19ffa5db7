from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from treeline_operator.plan_command import main

MANIFESTS = Path(__file__).parents[3] / "manifests"
NOW = datetime(2026, 11, 1, tzinfo=UTC)
POOL = """\
apiVersion: treeline.dev/v1alpha1
kind: InferencePool
metadata: {name: a}
spec: {model: {uri: "builtin://tiny"}}
"""
AFTER = POOL.replace('{model: {uri: "builtin://tiny"}}', '\n  model: {uri: "builtin://tiny"}')
TEMPLATE = "  template: "
RUNTIME = f"{TEMPLATE}{{spec: {{containers: [{{name: runtime, "
MODEL = """\
apiVersion: treeline.dev/v1alpha1
kind: InferenceModel
metadata: {name: chat}
spec: {modelName: chat, poolRef: {name: a}}
"""


def plan(*argv: str) -> str:
    out = io.StringIO()
    assert main(argv, out, NOW) == 0
    return out.getvalue()


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_new_pool_is_shown_whole_with_reasons(tmp_path: Path) -> None:
    text = plan("-f", write(tmp_path / "p.yaml", POOL), "-f", write(tmp_path / "m.yaml", MODEL))
    assert "# Deployment default/a-" in text
    assert "# ConfigMap default/treeline-gateway: pools of gateway treeline" in text
    assert "# model default/chat: Accepted" in text
    assert "uid-of-" not in text
    assert {"Service", "Secret", "Deployment"} < {obj["kind"] for obj in yaml.safe_load_all(text)}


def test_pickers_may_reach_an_api_server_on_other_ports(tmp_path: Path) -> None:
    pool = write(tmp_path / "pool.yaml", POOL)
    shown = plan("-f", pool, "--api-server-port", "443", "--api-server-port=16443")
    (egress,) = [
        obj["spec"]["egress"]
        for obj in yaml.safe_load_all(shown)
        if obj["kind"] == "NetworkPolicy" and obj["metadata"]["name"] == "treeline-epp"
    ]
    assert {"ports": [{"port": p, "protocol": "TCP"} for p in (443, 16443)]} in egress


def test_it_is_told_where_the_operator_lives(tmp_path: Path) -> None:
    text = plan("-f", write(tmp_path / "p.yaml", POOL), "--lease-namespace", "ops", "--image-pull-secret", "registry")
    assert "kubernetes.io/metadata.name: ops" in text
    assert "treeline-system" not in text
    assert "imagePullSecrets" in text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [", "p.yaml: while parsing"),
        ("- 1", "p.yaml: no Kubernetes object"),
        ("", "no InferencePool or InferenceModel in"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: x}", "no InferencePool or InferenceModel in"),
        (POOL.replace("v1alpha1", "v2"), "treeline.dev/v2 InferencePool is not ours"),
        (
            POOL.replace("spec: {", "spec: {modle: 1, "),
            "spec.modle: there is no such field; did you mean model?",
        ),
        (
            AFTER + "  engine: {contextLenght: 1}",
            "spec.engine.contextLenght: there is no such field; did you mean conte",
        ),
        (AFTER + "  engine: {xyz: 1}", "spec.engine.xyz: there is no such field\n"),
        (AFTER + "  preset: h100", "p.yaml: PresetMissing: there is no preset h100; the operator has: none"),
        (POOL.replace("builtin://tiny", "tiny"), "p.yaml: "),
        (POOL + "---\n" + POOL.replace("uri", "url"), "p.yaml: document 2: spec.model.uri: Field required"),
        (POOL.replace("metadata: {name: a}", "metadata: []"), "metadata"),
        ("kind: List\nitems: [1]", "p.yaml: items[0]: no Kubernetes object"),
        ("kind: List\nitems: [{kind: [a]}]", "p.yaml: items[0]: no Kubernetes object"),
        (AFTER + TEMPLATE + "{metadata: null}", "spec.template: metadata, spec and its containers"),
        (AFTER + TEMPLATE + "{spec: {containers: null}}", "spec.template: metadata, spec and its containers"),
        (AFTER + TEMPLATE + "{metadata: []}", "TemplateInvalid: spec.template: metadata must be a map"),
        (AFTER + RUNTIME + "ports: [{name: x}]}]}}", "every item of ports needs a containerPort"),
        (AFTER + RUNTIME + "env: [{name: [x]}]}]}}", "every item of env needs a name"),
        (AFTER + "  endpointPicker: {template: {spec: {securityContext: []}}}", "securityContext must be a map"),
        (
            POOL.replace("spec: {", "spec: {engine: {tensorParallel: 2}, "),
            "p.yaml: spec.engine.tensorParallel: ",
        ),
    ],
)
def test_bad_input_is_refused_with_file_document_and_field(
    text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-f", write(tmp_path / "p.yaml", text)], io.StringIO(), NOW) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert "Traceback" not in said


def test_a_pool_is_planned_with_the_preset_that_the_values_of_the_chart_have(tmp_path: Path) -> None:
    values = write(tmp_path / "values.yaml", "presets: {big: {engine: {contextLength: 77}}}")
    shown = plan("-f", write(tmp_path / "p.yaml", AFTER + "  preset: big"), "--presets", values)
    assert "--context-length=77" in shown
    assert "--context-length=78" in plan(
        "-f", write(tmp_path / "p.yaml", AFTER + "  preset: big\n  engine: {contextLength: 78}"), "--presets", values
    )


@pytest.mark.parametrize("sample", sorted((MANIFESTS / "samples").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_sample_can_be_planned(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    objects = list(yaml.safe_load_all(sample.read_text()))
    pools = [obj for obj in objects if obj["kind"] == "InferencePool"]
    shown = plan("-f", str(sample), "--presets", str(MANIFESTS / "presets.yaml"))
    assert all(f"# Deployment default/{pool['metadata']['name']}-" in shown for pool in pools)
    passed_over = [line.split(": ")[2] for line in capsys.readouterr().err.splitlines()]
    foreign = [obj for obj in objects if not obj["kind"].startswith("Inference")]
    assert passed_over == [f"{obj['apiVersion']} {obj['kind']} is not ours and passed over" for obj in foreign]


def test_warnings_stand_in_the_yaml_as_comments(tmp_path: Path) -> None:
    loud = AFTER + "  gateway: {standalone: {serviceType: LoadBalancer}}\n"
    text = plan("-f", write(tmp_path / "p.yaml", loud))
    warning = "pool default/a: warning GatewayOpen: gateway treeline is ready; its load balancer has no"
    assert f"# {warning}" in text


def test_files_that_are_not_there_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-f", str(tmp_path / "none.yaml")], io.StringIO(), NOW) == 2
    assert "none.yaml" in capsys.readouterr().err
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe")
    assert main(["-f", str(tmp_path / "a.yaml")], io.StringIO(), NOW) == 2
    assert "a.yaml: no text" in capsys.readouterr().err
    assert main(["-f", str(tmp_path)], io.StringIO(), NOW) == 2
    assert "Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[" * 100_000, "a: " + "{a: " * 2000, "{" * 5000, "a: 2001-99-99"])
def test_a_file_that_its_parser_trips_over_is_named(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-f", write(tmp_path / "a.yaml", text)], io.StringIO(), NOW) == 2
    assert "a.yaml: " in capsys.readouterr().err
