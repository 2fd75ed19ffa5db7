from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from treeline_operator.plan_command import main
from treeline_operator.simulation import merged

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


def as_cluster(folder: Path, pool: str) -> Path:
    """Return the plan's own result as a cluster would store it, with uids and times, and the pool itself."""
    observed = folder / "observed"
    observed.mkdir()
    file = write(folder / "first.yaml", pool)
    objects = list(yaml.safe_load_all(plan("-f", file, "-o", "yaml")))
    objects = [o for o in objects if o["kind"] != "Secret"]
    parent = yaml.safe_load(pool)
    parent["metadata"] |= {"namespace": "default", "uid": "uid-of-inferencepool-a", "generation": 1}
    owners = {"pool": parent["metadata"]["uid"], "anchor": "uid-of-configmap-treeline-gateway"}
    for obj in objects:
        obj["metadata"]["uid"] = f"uid-of-{obj['kind']}-{obj['metadata']['name']}".lower()
        anchored = "treeline.dev/pool" not in obj["metadata"]["labels"]
        if obj["metadata"]["name"] != "treeline-gateway" or obj["kind"] != "ConfigMap":
            owner = owners["anchor" if anchored else "pool"]
            kind = {"apiVersion": "v1", "kind": "ConfigMap", "name": "treeline-gateway"}
            if not anchored:
                kind = {"apiVersion": parent["apiVersion"], "kind": "InferencePool", "name": "a"}
            obj["metadata"]["ownerReferences"] = [
                {**kind, "uid": owner, "controller": True, "blockOwnerDeletion": True}
            ]
        else:
            obj["metadata"]["ownerReferences"] = [
                {
                    "apiVersion": parent["apiVersion"],
                    "kind": "InferencePool",
                    "name": "a",
                    "uid": owners["pool"],
                }
            ]
    (observed / "all.yaml").write_text(
        yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [*objects, parent]})
    )
    return observed


def test_a_new_pool_is_shown_whole_with_reasons(tmp_path: Path) -> None:
    text = plan("-f", write(tmp_path / "p.yaml", POOL), "-f", write(tmp_path / "m.yaml", MODEL), "--explain")
    assert "# create Deployment default/a-" in text
    assert "# create ConfigMap default/treeline-gateway: pools of gateway treeline" in text
    assert "+++ Service default/treeline-gateway" in text
    assert "# model default/chat: Accepted" in text
    assert text.rstrip().splitlines()[-1].startswith("# 2")
    assert "uid-of-" not in text


def test_unchanged_objects_are_not_written(tmp_path: Path) -> None:
    observed = as_cluster(tmp_path, POOL)
    text = plan("-f", write(tmp_path / "p.yaml", POOL), "--observed", str(observed))
    # Keys are never read, so whether they exist is not known; the picker's Deployment says that they do.
    assert text == "# nothing to do: the cluster matches the files\n"


def test_kinds_that_are_not_followed_are_left_alone(tmp_path: Path) -> None:
    observed = as_cluster(tmp_path, POOL)
    pool = {"apiVersion": "treeline.dev/v1alpha1", "kind": "InferencePool", "name": "a"}
    meta = {
        "name": "a",
        "namespace": "default",
        "uid": "u",
        "labels": {"app.kubernetes.io/managed-by": "treeline", "treeline.dev/pool": "a"},
        "ownerReferences": [{**pool, "uid": "uid-of-inferencepool-a", "controller": True}],
    }
    hpa = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": meta, "spec": {}}
    write(observed / "hpa.yaml", yaml.safe_dump(hpa))
    text = plan("-f", write(tmp_path / "p.yaml", POOL), "--observed", str(observed))
    assert text == "# nothing to do: the cluster matches the files\n"


def test_an_edit_is_shown_as_a_change_of_few_lines(tmp_path: Path) -> None:
    observed = as_cluster(tmp_path, POOL)
    edited = POOL.replace('"builtin://tiny"}', '"builtin://tiny"}, replicas: 3')
    text = plan("-f", write(tmp_path / "p.yaml", edited), "--observed", str(observed))
    changes = [line for line in text.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert changes == ["-  replicas: 1", "+  replicas: 3"]
    assert "# scale Deployment default/a-" in text
    assert "3 replicas wanted" in text


SECURED = """
  gateway:
    standalone:
      serviceType: LoadBalancer
      apiKeysSecretRef: {name: clients}
      tls: {secretRef: {name: certificate}}
      pickerTls: {secretRef: {name: of-the-picker}}
      annotations: {cloud.example/type: nlb}
  tracing: {endpoint: "http://collector:4317"}
  endpointPicker: {replicas: 2, failureMode: FailClose}
  engine: {port: 9000}
"""


@pytest.mark.parametrize(
    "off",
    [
        pytest.param("tls: {secretRef: {name: certificate}}", marks=pytest.mark.deep),
        pytest.param("apiKeysSecretRef: {name: clients}", marks=pytest.mark.deep),
        "",
    ],
)
def test_fields_removed_from_a_pool_are_removed_from_its_objects(off: str, tmp_path: Path) -> None:
    """A plan over an earlier spec's objects ends in the same objects as a plan of the new spec alone."""
    whole = AFTER + SECURED
    less = whole.replace(f"{off}\n", "\n") if off else AFTER
    assert less != whole
    observed = as_cluster(tmp_path, whole)
    file = write(tmp_path / "p.yaml", less)
    fresh = {(o["kind"], o["metadata"]["name"]): o for o in yaml.safe_load_all(plan("-f", file, "-o", "yaml"))}
    changed = list(yaml.safe_load_all(plan("-f", file, "--observed", str(observed), "-o", "yaml")))
    assert changed
    for obj in changed:
        alone = fresh[obj["kind"], obj["metadata"]["name"]]
        for part in obj.keys() - {"metadata"}:
            assert obj[part] == alone[part], (obj["kind"], obj["metadata"]["name"])
        assert obj["metadata"].get("annotations") == alone["metadata"].get("annotations")


def test_a_scale_down_shows_the_draining_pods(tmp_path: Path) -> None:
    two = POOL.replace('"builtin://tiny"}', '"builtin://tiny"}, replicas: 2')
    observed = as_cluster(tmp_path, two)
    (made,) = (
        o
        for o in yaml.safe_load((observed / "all.yaml").read_text())["items"]
        if o["kind"] == "Deployment" and "treeline.dev/pool" in o["metadata"]["labels"]
    )
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**made["spec"]["template"]["metadata"], "name": f"a-{n}", "namespace": "default"},
            "spec": {"nodeName": "n"},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        }
        for n in (1, 2)
    ]
    (observed / "pods.yaml").write_text(yaml.safe_dump_all(pods))
    text = plan("-f", write(tmp_path / "p.yaml", POOL), "--observed", str(observed), "--explain")
    assert "# change Pod default/a-1: 1 replicas wanted" in text
    assert "+    treeline.dev/serving: 'false'" in text
    assert "# scale" not in text
    assert "# pool default/a: pod a-1 leaves: its requests are not known yet" in text


def test_manual_changes_are_named(tmp_path: Path) -> None:
    observed = as_cluster(tmp_path, POOL)
    everything = yaml.safe_load((observed / "all.yaml").read_text())
    for obj in everything["items"]:
        if obj["kind"] == "Service" and obj["metadata"]["name"] == "treeline-gateway":
            obj["spec"]["ports"][0]["targetPort"] = 9
    (observed / "all.yaml").write_text(yaml.safe_dump(everything))
    file = write(tmp_path / "p.yaml", POOL)
    assert "#   changed by hand: spec.ports" in plan("-f", file, "--observed", str(observed), "--explain")
    shown = plan("-f", file, "--observed", str(observed))
    assert [line for line in shown.splitlines() if line.startswith("# change")] == [
        "# change Service default/treeline-gateway: the URL: changed by hand"
    ]


def test_pickers_may_reach_an_api_server_on_other_ports(tmp_path: Path) -> None:
    pool = write(tmp_path / "pool.yaml", POOL)
    shown = plan("-f", pool, "--output", "yaml", "--api-server-port", "443", "--api-server-port=16443")
    (egress,) = [
        obj["spec"]["egress"]
        for obj in yaml.safe_load_all(shown)
        if obj["kind"] == "NetworkPolicy" and obj["metadata"]["name"] == "treeline-epp"
    ]
    assert {"ports": [{"port": p, "protocol": "TCP"} for p in (443, 16443)]} in egress


def test_the_operators_namespace_is_reported(tmp_path: Path) -> None:
    text = plan("-f", write(tmp_path / "p.yaml", POOL), "--lease-namespace", "ops", "--image-pull-secret", "registry")
    assert "kubernetes.io/metadata.name: ops" in text
    assert "treeline-system" not in text
    assert "imagePullSecrets" in text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [", "p.yaml: while parsing"),
        ("- 1", "p.yaml: not a Kubernetes object"),
        ("", "no InferencePool or InferenceModel in"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: x}", "no InferencePool or InferenceModel in"),
        (POOL.replace("v1alpha1", "v2"), "treeline.dev/v2 InferencePool is not ours"),
        (
            POOL.replace("spec: {", "spec: {modle: 1, "),
            "spec.modle: unknown field; did you mean model?",
        ),
        (
            AFTER + "  engine: {contextLenght: 1}",
            "spec.engine.contextLenght: unknown field; did you mean conte",
        ),
        (AFTER + "  engine: {xyz: 1}", "spec.engine.xyz: unknown field\n"),
        (AFTER + "  preset: h100", "p.yaml: PresetMissing: unknown preset h100; the operator has: none"),
        (POOL.replace("builtin://tiny", "tiny"), "p.yaml: "),
        (POOL + "---\n" + POOL.replace("uri", "url"), "p.yaml: document 2: spec.model.uri: Field required"),
        (POOL.replace("metadata: {name: a}", "metadata: []"), "metadata"),
        ("kind: List\nitems: [1]", "p.yaml: items[0]: not a Kubernetes object"),
        ("kind: List\nitems: [{kind: [a]}]", "p.yaml: items[0]: not a Kubernetes object"),
        (AFTER + TEMPLATE + "{metadata: null}", "spec.template: metadata, spec and its containers"),
        (AFTER + TEMPLATE + "{spec: {containers: null}}", "spec.template: metadata, spec and its containers"),
        (AFTER + TEMPLATE + "{metadata: []}", "TemplateInvalid: spec.template: metadata must be a map"),
        (AFTER + RUNTIME + "ports: [{name: x}]}]}}", "every item of ports needs a containerPort"),
        (AFTER + RUNTIME + "env: [{name: [x]}]}]}}", "every item of env needs a name"),
        (
            AFTER + TEMPLATE + "{spec: {nodeSelectr: {a: b}}}",
            "spec.nodeSelectr: unknown field; did you mean nodeSelector?",
        ),
        (
            AFTER + "  endpointPicker: {template: {spec: {nodeSelectr: {}}}}",
            "TemplateInvalid: the pods of Deployment default/treeline-epp are invalid: spec.nodeS",
        ),
        (AFTER + "  endpointPicker: {template: {spec: {securityContext: []}}}", "securityContext must be a map"),
        (AFTER + RUNTIME + "envs: []}]}}", "spec.containers[0].envs: unknown field; did you mean env?"),
        (AFTER + TEMPLATE + "{spec: {node_selector: {a: b}}}", "spec.node_selector: unknown field"),
        (AFTER + TEMPLATE + "{spec: {priority: high}}", "spec.priority: Input should be a valid integer"),
        (AFTER + TEMPLATE + "{spec: {restartPolicy: Never}}", "spec.restartPolicy: a Deployment's pods have Always"),
        (AFTER + RUNTIME + "livenessProbe: {periodSecs: 3}}]}}", "livenessProbe.periodSecs: unknown field"),
        (
            AFTER + RUNTIME + "resources: {limits: {memory: 1Mi}}}]}}",
            "512Mi of memory are requested and limited to 1Mi",
        ),
        (AFTER + RUNTIME + "resources: {limits: {memory: 1GB}}}]}}", "'1GB' is no quantity"),
        (AFTER + RUNTIME + "volumeMounts: [{name: x, mountPath: /x}]}]}}", "there is no volume x"),
        (AFTER + TEMPLATE + "{spec: {containers: [{name: runtme}]}}", "spec.containers[runtme]: image is required"),
        (
            POOL.replace("spec: {", "spec: {accelerator: {type: nvidia, nodes: 2}, engine: {dataParallel: 2}, "),
            "p.yaml: spec.engine.dataParallel: ",
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


def test_a_pool_is_planned_with_a_preset_of_the_charts_values(tmp_path: Path) -> None:
    values = write(tmp_path / "values.yaml", "presets: {big: {engine: {contextLength: 77}}}")
    shown = plan("-f", write(tmp_path / "p.yaml", AFTER + "  preset: big"), "--presets", values, "-o", "yaml")
    assert "--context-length=77" in shown
    assert "--context-length=78" in plan(
        "-f", write(tmp_path / "p.yaml", AFTER + "  preset: big\n  engine: {contextLength: 78}"), "--presets", values
    )


def test_a_plan_says_how_many_gpus_a_replica_takes(tmp_path: Path) -> None:
    for accelerator, said in (
        ("", "of the spec\n"),
        ("{type: nvidia}", "of the spec, 1 GPU per replica\n"),
        ("{type: nvidia, count: 4}", "of the spec, 4 GPUs per replica\n"),
    ):
        more = f"  accelerator: {accelerator}" if accelerator else ""
        assert said in plan("-f", write(tmp_path / "p.yaml", f"{AFTER}{more}\n"))


@pytest.mark.parametrize("sample", sorted((MANIFESTS / "samples").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_sample_can_be_planned(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    objects = list(yaml.safe_load_all(sample.read_text()))
    pools = [obj for obj in objects if obj["kind"] == "InferencePool"]
    groups = ("--api", "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet")
    shown = plan("-f", str(sample), "--presets", str(MANIFESTS / "presets.yaml"), *groups)
    for pool in pools:
        kind = "LeaderWorkerSet" if pool["spec"].get("accelerator", {}).get("nodes", 1) > 1 else "Deployment"
        assert f"# create {kind} default/{pool['metadata']['name']}-" in shown
    passed_over = [line.split(": ")[2] for line in capsys.readouterr().err.splitlines()]
    foreign = [obj for obj in objects if not obj["kind"].startswith("Inference")]
    assert passed_over == [f"{obj['apiVersion']} {obj['kind']} is not ours, ignored" for obj in foreign]


def test_yaml_output_has_explanations_and_warnings_as_comments(tmp_path: Path) -> None:
    loud = (
        AFTER
        + "  gateway: {standalone: {serviceType: LoadBalancer}}\n"
        + RUNTIME
        + "resources: {limits: {cpu: 0.5}}}]}}\n"
    )
    file = write(tmp_path / "p.yaml", loud)
    text = plan("-f", file, "--explain", "-o", "yaml")
    assert list(yaml.safe_load_all(text)) == list(yaml.safe_load_all(plan("-f", file, "-o", "yaml")))
    assert "# create Deployment default/a-" in text
    warning = "pool default/a: warning GatewayOpen: gateway treeline is ready; its load balancer has no"
    assert f"# {warning}" in text
    assert f"# {warning}" in plan("-f", file, "--explain")


def test_files_that_are_not_there_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-f", str(tmp_path / "none.yaml")], io.StringIO(), NOW) == 2
    assert "none.yaml" in capsys.readouterr().err
    file = write(tmp_path / "p.yaml", POOL)
    assert main(["-f", file, "--observed", str(tmp_path / "none")], io.StringIO(), NOW) == 2
    assert "is not a directory" in capsys.readouterr().err
    (tmp_path / "o").mkdir()
    write(tmp_path / "o" / "x.yaml", "apiVersion: v1\nkind: Service\n")
    assert main(["-f", file, "--observed", str(tmp_path / "o")], io.StringIO(), NOW) == 2
    assert "x.yaml: no object of a cluster" in capsys.readouterr().err
    (tmp_path / "o" / "a.yaml").write_bytes(b"\xff\xfe")
    assert main(["-f", file, "--observed", str(tmp_path / "o")], io.StringIO(), NOW) == 2
    assert "a.yaml: no text" in capsys.readouterr().err
    assert main(["-f", str(tmp_path)], io.StringIO(), NOW) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_secrets_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "data": {"k": "aHVzaA=="}}
    write(tmp_path / "o" / "s.yaml", yaml.safe_dump(secret))
    text = plan("-f", write(tmp_path / "p.yaml", POOL), "--observed", str(tmp_path / "o"), "--explain")
    assert "aHVzaA" not in text


def test_lists_are_merged_by_the_keys_of_kubernetes() -> None:
    there = {
        "a": 1,
        "labels": {"ours": "1", "theirs": "2"},
        "containers": [{"name": "x", "image": "1", "tty": True}, {"name": "mesh"}, {"name": "gone"}],
        "ports": [{"name": "old", "containerPort": 1, "protocol": "TCP"}, {"containerPort": 2}],
        "tolerations": [{"key": "a"}],
        "args": [1, 2],
    }
    before = {
        "labels": {"ours": "1"},
        "containers": [{"name": "x"}, {"name": "gone"}],
        "args": [1, 2],
        "tolerations": [],
    }
    ours = {
        "b": 2,
        "containers": [{"name": "x", "image": "3"}],
        "ports": [{"name": "new", "containerPort": 1}],
        "tolerations": [{"key": "b"}],
    }
    assert merged(there, before, ours) == {
        "a": 1,
        "b": 2,
        "labels": {"theirs": "2"},
        "containers": [{"name": "x", "image": "3", "tty": True}, {"name": "mesh"}],
        "ports": [{"name": "new", "containerPort": 1, "protocol": "TCP"}, {"containerPort": 2}],
        "tolerations": [{"key": "b"}],
    }


@pytest.mark.parametrize("text", ["[" * 100_000, "a: " + "{a: " * 2000, "{" * 5000, "a: 2001-99-99"])
def test_a_file_that_crashes_the_parser_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-f", write(tmp_path / "a.yaml", text)], io.StringIO(), NOW) == 2
    assert "a.yaml: " in capsys.readouterr().err
