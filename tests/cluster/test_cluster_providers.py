"""The choice of a cluster, its command lines, and the leftovers that count as an error."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from e2e.cluster import config, network, packages
from e2e.cluster.__main__ import main
from e2e.cluster.existing import ALLOWED, Existing, allowed
from e2e.cluster.leftovers import compare
from e2e.cluster.network import Node
from e2e.cluster.node import hierarchies, make_cgroups, remove_cgroups, set_up
from e2e.cluster.place import ClusterError
from e2e.cluster.providers import choose


class Fake:
    def __init__(self, name: str, reason: str | None) -> None:
        self.name, self._reason = name, reason

    def unfit(self) -> str | None:
        return self._reason


def test_auto_chooses_the_first_available_provider_or_says_why_there_is_none() -> None:
    offered = {"a": Fake("a", "no Docker"), "b": Fake("b", None)}
    assert choose("auto", offered).name == "b"  # type: ignore[arg-type]
    assert choose("a", offered).name == "a"  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="a: no Docker"):
        choose("auto", {"a": offered["a"]})  # type: ignore[dict-item]
    with pytest.raises(ClusterError, match="there are auto, a, b"):
        choose("c", offered)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("context", "contexts", "may"),
    [
        ("dev", "dev", True),
        ("dev", "prod, dev", True),
        ("dev", "", False),
        ("", "", False),
        ("", ",", False),
        ("production", "prod", False),
        ("dev", "*", False),
    ],
)
def test_a_context_is_allowed_by_its_whole_name(context: str, contexts: str, may: bool) -> None:
    assert allowed(context, contexts) is may


def test_an_existing_cluster_is_never_chosen_without_an_allow_list() -> None:
    assert ALLOWED in str(Existing({"KUBECONFIG": "/somewhere"}).unfit())
    assert Existing({ALLOWED: "dev"}).unfit() is None


def test_an_existing_cluster_without_a_kubeconfig_is_refused(tmp_path: Path) -> None:
    status = Existing({ALLOWED: "dev", "KUBECONFIG": str(tmp_path / "none")}).status()
    assert status["state"] == "refused"
    assert "no kubeconfig" in status["why"]


def test_a_cluster_is_kept_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLUSTER_KEEP", "1")
    monkeypatch.setenv("TREELINE_E2E_HOME", str(tmp_path / "foreign"))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/file").touch()
    assert main(["down", "--provider", "local"]) == 0
    # with force it is tried, and refused: the folder is not ours
    assert main(["down", "--provider", "local", "--force"]) == 1
    assert (tmp_path / "foreign/file").exists()


def test_a_machine_that_cannot_have_a_cluster_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TREELINE_E2E_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(packages.os, "geteuid", lambda: 1000)
    assert main(["fit", "--provider", "local"]) == 3
    assert "needs root" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setenv("TREELINE_E2E_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TREELINE_CACHE", str(tmp_path / "not-there-yet"))
    monkeypatch.setattr(packages, "unfit", lambda: None)
    monkeypatch.setattr("e2e.cluster.images.shutil.disk_usage", lambda _: SimpleNamespace(free=1e9))
    assert main(["fit", "--provider", "local"]) == 3
    assert "1 GB are free" in capsys.readouterr().out
    assert not (tmp_path / "home").exists(), "nothing is made by asking"
    (tmp_path / "home").mkdir()
    assert main(["fit", "--provider", "local"]) == 0, "one that is there can be taken down on a full disk"


def test_routes_that_overlap_with_the_clusters_are_reported() -> None:
    routes = [
        {"dst": "default", "dev": "eth0"},
        {"dst": "192.0.2.0/24", "dev": "eth0"},
        {"dst": "10.0.0.0/8", "dev": "vpn"},
        {"dst": "10.244.0.0/24", "dev": network.CABLE},
        {"dst": "10.96.0.1", "dev": "vpn"},
    ]
    assert network.clashes(json.dumps(routes)) == ["10.0.0.0/8", "10.96.0.1"]
    assert network.clashes("") == []


def test_nodes_have_addresses_of_their_own() -> None:
    nodes = [Node(n) for n in range(3)]
    assert len({n.address for n in nodes} | {network.HOST}) == 4
    assert not any(a.pods.overlaps(b.pods) for a in nodes for b in nodes if a != b)
    assert network.neighbours(nodes[0], nodes[:2]) == ["ip route add 10.244.1.0/24 via 10.250.0.12"]
    assert len(network.CABLE) <= 15


def test_a_node_finds_everything_inside_its_own_folder() -> None:
    assert "/work/node one" not in set_up(Path("/work/node one"), Path("/work/pki"), "node-1").replace(
        "'/work/node one'", ""
    )
    written = [*config.etcd(), *config.apiserver(Node(0)), *config.kubelet_flags(Node(0))]
    paths = [w.partition("=")[2] for w in written if w.partition("=")[2].startswith("/")]
    assert paths
    assert all(path.startswith(str(config.INSIDE)) for path in paths)


def test_containerds_configuration_is_toml_for_any_folder_name() -> None:
    tomllib = pytest.importorskip("tomllib")
    parsed = tomllib.loads(config.containerd(Path('/a "b"'), Path("/state"), "/plugins"))
    assert parsed["root"] == '/a "b"/containerd'
    cri = parsed["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["restrict_oom_score_adj"] is True
    assert cri["cni"] == {"bin_dir": "/plugins", "conf_dir": '/a "b"/cni'}


def test_control_groups_are_made_in_every_hierarchy_and_removed(tmp_path: Path) -> None:
    for name in ("cpuset", "memory"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").touch()
    assert [h.name for h in hierarchies(tmp_path)] == ["cpuset", "memory"]
    make_cgroups("node-1", tmp_path)
    made = tmp_path / "memory/treeline-e2e/node-1"
    assert made.is_dir()
    (made / "kubepods/pod").mkdir(parents=True)
    remove_cgroups(tmp_path)
    assert [p.name for p in (tmp_path / "memory").iterdir()] == ["cgroup.procs"]


def test_a_group_in_use_is_reported_and_not_forced(tmp_path: Path) -> None:
    group = tmp_path / "memory/treeline-e2e"
    group.mkdir(parents=True)
    (tmp_path / "memory/cgroup.procs").touch()
    (group / "busy").touch()
    with pytest.raises(ClusterError, match="still in use"):
        remove_cgroups(tmp_path, patience_s=0)


def test_leftovers_and_losses_are_reported_but_ended_processes_of_others_are_not() -> None:
    before = {"processes": ["1 etcd"], "interfaces": ["eth0"], "files": ["/run/x"]}
    after = {"processes": ["2 kubelet"], "interfaces": ["cni0"], "files": []}
    assert compare(before, after) == [
        "processes: left: 2 kubelet",
        "interfaces: left: cni0",
        "interfaces: gone: eth0",
    ]
    assert compare(before, before) == []
