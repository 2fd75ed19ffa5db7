"""Causes of unready pods: one row for each kind of trouble, with statuses as kubelets and schedulers write them."""

from __future__ import annotations

import inspect
import json
import re

import pytest
from support.operator_status import deployment, event, observed, pod, pool, ready
from support.operator_trouble import BACK_OFF, POD, REJECTIONS, RUNNING, TROUBLES, crashed, init, runtime, unscheduled
from treeline_operator.api.conditions import Reason
from treeline_operator.status import causes as causes_module
from treeline_operator.status.causes import diagnose, percent, size
from treeline_operator.status.pool import refusal
from treeline_runtime.download import ModelNotFound, resolve_model

POOL = pool()


def test_every_reason_that_may_be_a_cause_has_its_place_among_them():
    """A reason without a place would be a KeyError when it meets another."""
    named = set(re.findall(r"Reason\.([A-Z_]+)", inspect.getsource(causes_module)))
    assert named == {reason.name for reason in causes_module._RANK}


def test_a_cause_is_reported_with_the_pods_that_have_it_and_what_to_do():
    """A pool's status ignores evicted pods; it reports every other trouble."""
    status, reason, text = TROUBLES["evicted"]
    pods = [pod(POOL, "tiny-0", **ready()).object, pod(POOL, POD, **status).object]
    (cause,) = diagnose(pods)
    assert (cause.reason, cause.pods) == (reason, (POD,))
    assert cause.detail.startswith("1 of 2 pods (tiny-1): ")
    assert text in cause.detail
    assert cause.message.endswith(reason.fix)


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (None, "the weights are being downloaded"),
        ((3 << 30, 16 << 30), "18 % of 16.0 GiB are there"),
        ((700, 0), "700 B of the weights are there"),
    ],
)
def test_a_download_reports_its_progress(told, text):
    pods = [pod(POOL, POD, **init(RUNNING)).object]
    causes = diagnose(pods, progress={} if told is None else {POD: told})
    assert text in causes[0].detail


def test_pods_that_are_ready_or_end_have_no_cause():
    gone = pod(POOL, "a", deleting=True, **runtime(BACK_OFF)).object
    done = pod(POOL, "b", phase="Succeeded").object
    assert diagnose([pod(POOL, "c", **ready()).object, gone, done]) == []


def test_the_most_useful_cause_comes_first_and_says_how_many_pods_have_it():
    pods = [pod(POOL, f"p-{n}", **unscheduled("3 Insufficient nvidia.com/gpu")).object for n in range(5)]
    pods.append(pod(POOL, "p-5", **crashed(1, 1, message="boom")).object)
    pods.append(pod(POOL, "p-6", **init(RUNNING)).object)
    crash, capacity, download = diagnose(reversed(pods))
    assert (crash.reason, crash.pods) == (Reason.CRASH_LOOPING, ("p-5",))
    assert capacity.detail == "5 of 7 pods (p-0, p-1, p-2 and 2 more): 3 Insufficient nvidia.com/gpu"
    assert download.reason is Reason.WEIGHTS_DOWNLOADING


def test_the_same_trouble_in_other_words_is_reported_in_those_of_most_pods():
    words = ["one", "two", "two"]
    pods = [pod(POOL, f"p-{n}", **crashed(1, 1, message=text)).object for n, text in enumerate(words)]
    assert "last line: two" in diagnose(pods)[0].detail


def test_messages_of_our_runtime_about_missing_models_are_recognised(tmp_path):
    """The messages for a missing folder, an empty one, a file, and a folder without weights."""
    (file := tmp_path / "file").touch()
    (empty := tmp_path / "empty").mkdir()
    (half := tmp_path / "half").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (half / name).write_text("{}")
    for path in (tmp_path / "nope", empty, file, half):
        with pytest.raises(ModelNotFound) as said:
            resolve_model(str(path))
        words = json.dumps({"level": "error", "message": f"treeline serve: error: {said.value}"}) + "\n"
        status = crashed(1, 1, message=words)
        (cause,) = diagnose([pod(POOL, POD, **status).object])
        assert cause.reason is Reason.WEIGHTS_MISSING, words


def test_a_long_last_line_is_cut():
    status = crashed(1, 1, message="x" * 5000)
    assert len(diagnose([pod(POOL, POD, **status).object])[0].detail) < 500


@pytest.mark.parametrize(("reason", "message"), REJECTIONS.items(), ids=REJECTIONS)
def test_pods_that_cannot_be_made(reason, message):
    """The cause is in the Deployment's condition, or in events while the condition is missing."""
    failed = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
    told = deployment("tiny-ab12", 2, 0, conditions=[failed]).object
    (cause,) = diagnose([], [told])
    assert cause.reason is reason
    assert cause.detail.startswith("Deployment tiny-ab12 cannot make pods: ")
    assert "x7k2p" not in cause.detail, "a name that is another at every try would never come to rest"
    status = {"replicas": 0}
    silent = observed("Deployment", "tiny-ab12", "apps/v1", spec={"replicas": 2}, status=status).object
    about = event("tiny-ab12-6d5f", "FailedCreate", f"Error creating: {message}")
    other = event("tiny-cd34-6d5f", "FailedCreate", "Error creating: other")
    assert diagnose([], [silent], [other, about])[0].reason is reason
    assert diagnose([], [silent], [other]) == []


@pytest.mark.parametrize(
    ("status", "why", "text"),
    [
        (runtime(RUNNING, started=False), "FailedMount", 'secret "treeline-kv-keys" not found'),
        (init(RUNNING), "FailedMount", "timed out"),
        (runtime(RUNNING, started=True), "Unhealthy", "Startup probe failed: HTTP 503"),
    ],
    ids=["mounted since", "mounted since, downloads", "started since"],
)
def test_old_events_are_no_cause(status, why, text):
    """Events stay for an hour after their problem is solved."""
    (cause,) = diagnose([pod(POOL, POD, **status).object], (), [event(POD, why, text)])
    assert cause.reason in (Reason.MODEL_LOADING, Reason.WEIGHTS_DOWNLOADING, Reason.PODS_STARTING)
    assert text not in cause.detail


@pytest.mark.parametrize(
    ("code", "kind", "message", "reason"),
    [
        (403, "PersistentVolumeClaim", "exceeded quota: storage", Reason.QUOTA_EXCEEDED),
        (422, "Deployment", "spec.template.spec.containers[0].image: Required value", Reason.TEMPLATE_INVALID),
        (422, "Deployment", "ValidatingAdmissionPolicy 'x' denied request: no hostPath", Reason.POD_REJECTED),
        (403, "Role", "is attempting to grant RBAC permissions not currently held", Reason.RECONCILE_FAILED),
        (500, "Deployment", "etcdserver: request timed out", Reason.RECONCILE_FAILED),
    ],
)
def test_refused_writes(code, kind, message, reason):
    cause = refusal(code, kind, message)
    assert (cause.reason, cause.detail) == (reason, message)


def test_figures_for_people():
    assert [size(n) for n in (0, 1023, 1024, 5 << 20, 3 << 40)] == ["0 B", "1023 B", "1.0 KiB", "5.0 MiB", "3072.0 GiB"]
    assert [percent(*pair) for pair in ((0, 0), (1, 3), (999, 1000), (7, 7), (9, 7))] == [0, 33, 99, 100, 100]
