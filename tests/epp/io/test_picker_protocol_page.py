"""docs/picker-protocol.md is correct: its diagrams are replayed, its samples are read and, where possible, run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.control_plane import programs_or_skip
from support.envoy import running_envoy
from support.epp_io import engines, running_picker
from support.http import client
from support.ports import free_ports
from treeline_epp.extproc.state import (
    BodyMode,
    ExtProcState,
    Immediate,
    Kind,
    Message,
    Output,
    Reply,
    ResponsePhase,
    RouteRequest,
)
from treeline_epp.flow.settings import FlowSettings
from treeline_epp.options import options_of
from treeline_epp.picking.decision import NoEndpoints
from treeline_epp.requests.refusals import of_pick
from treeline_operator.envoy import EnvoyConfig
from treeline_wire import headers as names

from e2e.gateway_api.envoy_gateway import PROGRAMS, EnvoyGateway

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "picker-protocol.md").read_text()
CRDS = ROOT / "e2e" / "gateway_api" / "crds"
DESTINATION = "10.0.0.1:8000,10.0.0.2:8000"


def sections() -> dict[str, str]:
    """Return the text below each heading."""
    parts = re.split(r"^##+ (.+)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def blocks(language: str, section: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", sections()[section], re.DOTALL | re.MULTILINE)


# Diagrams

MODES = {
    "BUFFERED": (BodyMode.BUFFERED, BodyMode.NONE),
    "BUFFERED_PARTIAL": (BodyMode.BUFFERED_PARTIAL, BodyMode.NONE),
    "STREAMED": (BodyMode.STREAMED, BodyMode.NONE),
    "FULL_DUPLEX_STREAMED": (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED),
    "NONE": (BodyMode.NONE, BodyMode.NONE),
    "No body": (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED),
    "A refusal": (BodyMode.BUFFERED, BodyMode.NONE),
}
HALF = b"x" * 40_000
"""Half of a body that returns in two chunks."""


def spoken(output: Output) -> str:
    """Return an answer in the words of the diagrams."""
    if isinstance(output, Immediate):
        return f"immediate_response {output.status}"
    assert isinstance(output, Reply)
    assert output.destination in (None, DESTINATION)
    words = [output.kind.value + (" + destination" if output.destination else "")]
    words += ["chunk"] if output.chunk is not None else []
    return ", ".join([*words, *(["end of stream"] if output.end_of_stream else [])])


def lines(diagram: str) -> Iterator[tuple[str, str]]:
    """Yield the speaker and the text of each line. A note over the picker alone is a remark."""
    first, *rest = diagram.splitlines()
    assert first == "sequenceDiagram"
    for line in (one.strip() for one in rest):
        if found := re.fullmatch(r"(?:Note over )?([CPES]-?->>[CPES]|E|P,E): (.+)", line):
            yield found[1], found[2]
        else:
            assert re.fullmatch(r"participant ([CPES]) as (Client|Proxy|Picker|Endpoint)", line), line


@pytest.mark.parametrize("section", MODES)
def test_a_diagram_equals_the_exchange(section: str) -> None:
    (diagram,) = blocks("mermaid", section)
    state = ExtProcState(*MODES[section], body_limit=1_000_000)
    waiting: list[Output] = []
    answered = 0
    for who, said in lines(diagram):
        if who == "P->>E":
            assert not waiting, f"{said}: the picker has not said {waiting} yet"
            kind, _, end = said.partition(", ")
            data = HALF if "body" in kind else b""
            headers = {":method": "POST", ":path": "/v1/chat/completions"} if kind == "request_headers" else {}
            waiting = state.receive(Message(Kind(kind), end == "end of stream", headers, data))
        elif who == "E":
            (request,) = waiting
            assert isinstance(request, RouteRequest), "the picker thinks when it knows enough"
            whole = "prompt" in said or "no endpoint" in said or section == "No body"
            assert (request.body is not None) == whole
            waiting = state.refuse(of_pick(NoEndpoints(""))) if "no endpoint" in said else state.answer(DESTINATION)
        elif who == "E-->>P":
            assert spoken(waiting.pop(0)) == said
            answered += 1
        elif who == "P,E":
            assert said == "the stream has ended"
            assert state.finished or state.response_phase is ResponsePhase.DONE
    assert not waiting
    assert answered


def test_every_mode_has_its_diagram() -> None:
    assert {mode.name for mode in BodyMode} - {"GRPC"} <= set(MODES)
    assert set(MODES) == {name for name in sections() if blocks("mermaid", name)}


# Plain Envoy


def with_ports(node: Any, ports: dict[int, int]) -> Any:
    """Return the sample with other ports."""
    if isinstance(node, dict):
        return {k: ports[v] if k == "port_value" else with_ports(v, ports) for k, v in node.items()}
    return [with_ports(item, ports) for item in node] if isinstance(node, list) else node


@pytest.mark.integration
@pytest.mark.deep
async def test_the_plain_envoy_sends_requests_to_the_picked_endpoint(tmp_path: Path) -> None:
    (text,) = blocks("yaml", "Plain Envoy")
    listen, admin = free_ports(2)
    async with engines(2) as fakes:
        words = [word for fake in fakes for word in ("--endpoint", f"{fake.name}={fake.address}")]
        async with running_picker(*words) as picker:
            config = EnvoyConfig(
                listen_port=listen,
                admin_port=admin,
                ext_proc_port=picker.options.grpc_port,
                eds_port=picker.options.grpc_health_port,
            )
            ours = {8080: listen, 9901: admin, 9002: config.ext_proc_port, 9003: config.eds_port}
            sample = with_ports(yaml.safe_load(text), ours)

            def patch(bootstrap: dict[str, Any]) -> None:
                bootstrap.clear()
                bootstrap.update(sample)

            async with running_envoy(config, tmp_path, patch=patch) as envoy, client(base_url=envoy.url) as http:
                wrong = {names.DESTINATION: "127.0.0.1:1"}
                for turn in range(8):  # all of a conversation goes to one: its prefix is there
                    body = {"model": "tiny", "prompt": "a long beginning " * 50 + str(turn)}
                    answer = await http.post("/v1/completions", json=body, headers=wrong)
                    assert answer.status_code == 200, answer.text
                (chosen,) = [fake for fake in fakes if fake.served]
                assert len(chosen.served) == 8
                sent = chosen.served[0].headers[names.DESTINATION]
                assert sent.split(",") == [chosen.address, next(f.address for f in fakes if f is not chosen)]
                metrics = await picker.metrics()
                assert metrics['treeline_epp_outcomes_total{outcome="headers"}'] == 8
                assert not [name for name in metrics if "served_by_other" in name], "the picker is told who served"
                assert (await http.post("/v1/completions", json={"model": "nobody's"})).status_code == 404
                await chosen.stop()  # the next one is tried, or the picker has noticed
                assert (await http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})).status_code == 200
                await picker.stop()
                answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
                assert answer.status_code == 200, "it fails open, as the page says"


# Kinds of gateways


def test_the_plain_envoy_lets_requests_wait_in_the_picker() -> None:
    (text,) = blocks("yaml", "Plain Envoy")
    (most,) = re.findall(r"max_message_timeout: (\d+)s", text)
    assert int(most) > FlowSettings().ttl_seconds


def schemas(*folders: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the schemas by which the API server checks objects, by `(apiVersion, kind)`."""
    found = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.yaml"))):
        crd = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        for version in crd["spec"]["versions"]:
            api = f"{crd['spec']['group']}/{version['name']}"
            found[api, crd["spec"]["names"]["kind"]] = closed(version["schema"]["openAPIV3Schema"])
    return found


def closed(schema: Any) -> Any:
    """Return the schema with unknown fields as errors, as a server does under `--validate=strict`."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: closed(value) for key, value in schema.items() if key != "format"}
    if isinstance(out.get("properties"), dict) and out.get("type") == "object" and "additionalProperties" not in out:
        out["additionalProperties"] = False
    if "metadata" in out.get("properties", {}) and "apiVersion" in out["properties"]:
        out["properties"]["metadata"] = {"type": "object"}
    return out


def objects(section: str, block: int) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(blocks("yaml", section)[block]))


def existing(file: str) -> dict[str, dict[str, Any]]:
    text = (ROOT / "manifests" / "existing-pods" / f"{file}.yaml").read_text()
    return {obj["kind"]: obj for obj in yaml.safe_load_all(text)}


def check_kinds(found: list[dict[str, Any]], known: dict[tuple[str, str], dict[str, Any]], unknown: set[str]) -> None:
    for obj in found:
        if obj["kind"] not in unknown:
            jsonschema.validate(obj, known[obj["apiVersion"], obj["kind"]])


@pytest.mark.parametrize(("section", "block"), [("Envoy Gateway", 1), ("Istio", 0)])
def test_the_sample_gateways_are_valid_and_are_those_of_the_route(section: str, block: int) -> None:
    found = objects(section, block)
    known = schemas(CRDS / "gateway-api", CRDS / "inference-extension")
    check_kinds(found, known, {"ClientTrafficPolicy", "BackendTrafficPolicy", "DestinationRule"})
    (gateway,) = [obj for obj in found if obj["kind"] == "Gateway"]
    route = existing("pool")["HTTPRoute"]
    assert [parent["name"] for parent in route["spec"]["parentRefs"]] == [gateway["metadata"]["name"]]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            gateway | {"spec": gateway["spec"] | {"listener": []}}, known[gateway["apiVersion"], "Gateway"]
        )


def test_the_policies_of_envoy_gateway_are_valid() -> None:
    chart = programs_or_skip("envoy-gateway")["envoy-gateway"] / "gateway-helm"
    known = schemas(chart / "charts/crds/crds/generated")
    found = objects("Envoy Gateway", 1)
    check_kinds(found, known, {"GatewayClass", "Gateway"})
    (backend,) = [obj for obj in found if obj["kind"] == "BackendTrafficPolicy"]
    assert backend["spec"]["targetRefs"][0]["name"] == existing("pool")["HTTPRoute"]["metadata"]["name"]


def test_the_values_of_envoy_gateway_equal_the_journeys() -> None:
    nowhere: Any = {name: Path() for name in PROGRAMS}
    kube: Any = None
    used = EnvoyGateway(kube, nowhere, "")._gateway_values(extended=True)["config"]["envoyGateway"]
    (values,) = objects("Envoy Gateway", 0)
    told = values["config"]["envoyGateway"]
    assert told["extensionManager"] == used["extensionManager"]
    assert told["extensionApis"].items() <= used["extensionApis"].items()


def test_istio_is_configured_for_the_pickers_tls() -> None:
    (rule,) = [obj for obj in objects("Istio", 0) if obj["kind"] == "DestinationRule"]
    picker = existing("picker")
    assert rule["spec"]["host"] == picker["Service"]["metadata"]["name"]
    assert rule["spec"]["trafficPolicy"] == {"tls": {"mode": "SIMPLE", "insecureSkipVerify": True}}
    (container,) = picker["Deployment"]["spec"]["template"]["spec"]["containers"]
    options = options_of([arg for arg in container["args"] if not arg.startswith("--tokenizer")])
    assert options.secure_serving
    assert not options.own_proxy, "as the page says of Envoy Gateway"
