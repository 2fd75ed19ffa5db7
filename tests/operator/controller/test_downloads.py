from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.virtual_loop import run
from treeline_kube.errors import Unavailable
from treeline_operator.controller.downloads import Downloads, parse
from treeline_operator.controller.store import Store
from treeline_operator.world import Key

KEY = Key("pool", "n", "p")


def pod(name: str, version: int, state: str = "running") -> dict[str, Any]:
    meta = {"name": name, "namespace": "n", "uid": name, "resourceVersion": str(version)}
    containers = [{"name": "model", "state": {state: {}}}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**meta, "labels": {"treeline.dev/pool": "p"}},
        "status": {"initContainerStatuses": containers},
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("warning: no token\n", None),
        (
            '{"bytes_done": 5, "bytes_total": 10}\n{"bytes_done": 7, "bytes_total": 10}\nwarning: slow\n',
            (7, 10),
        ),
        ('{"bytes_done": 5}\n{"bytes_don', (5, 0)),
        ('{"bytes_done": "many"}', None),
        ('{"bytes_done": 5}\n{"a":' + "[" * 100_000 + "]" * 100_000 + "}", (5, 0)),
    ],
)
def test_the_last_progress_line_counts(text: str, expected: tuple[int, int] | None) -> None:
    said = parse(text)
    assert (said and (said.bytes_done, said.bytes_total)) == expected


class Log:
    def __init__(self) -> None:
        self.done: int | None = 0
        self.reads = 0
        self.more = ""

    async def logs(self, namespace: str, pod: str, container: str, *, tail_lines: int) -> str:
        assert (namespace, container) == ("n", "model")
        self.reads += 1
        if self.done is None:
            raise Unavailable("no kubelet")
        return f'{{"bytes_done": {self.done}, "bytes_total": 1000{self.more}}}\n'


def test_a_download_is_followed_while_it_runs_and_reported_by_the_percent() -> None:
    async def main() -> None:
        store, source, changed = Store(), Log(), []
        downloads = Downloads(store, source, changed.append)
        task = asyncio.create_task(downloads.run())
        store.put(pod("a", 1))
        downloads.see(KEY, store.pool_children("n", "p"))
        await asyncio.sleep(1)
        assert downloads.progress(KEY) == {"a": (0, 1000)}
        source.done = 4
        await asyncio.sleep(5)
        assert len(changed) == 1, "less than a percent is no news"
        source.done = 250
        downloads.see(KEY, store.pool_children("n", "p"))
        await asyncio.sleep(5)
        assert downloads.progress(KEY) == {"a": (250, 1000)}
        source.done = None
        await asyncio.sleep(5)
        assert downloads.progress(KEY) == {"a": (250, 1000)}, "a log that cannot be read takes nothing back"
        store.put(pod("a", 2, "terminated"))
        await asyncio.sleep(5)
        reads = source.reads
        assert downloads.progress(KEY) == {}
        await asyncio.sleep(60)
        assert source.reads == reads
        assert changed == [KEY, KEY]
        await downloads.stop()
        await task

    run(main())


def test_the_commit_of_a_download_is_reported_while_it_runs_and_the_first_one_counts() -> None:
    async def main() -> None:
        store, source, changed = Store(), Log(), []
        downloads = Downloads(store, source, changed.append)
        task = asyncio.create_task(downloads.run())
        store.put(pod("a", 1))
        downloads.see(KEY, store.pool_children("n", "p"))
        for commit in ("one", "other"):
            source.more = f', "commits": {{"hf://o/n": "{commit}"}}'
            await asyncio.sleep(6)
            assert downloads.commits(KEY) == {"hf://o/n": "one"}
        assert changed == [KEY]
        downloads.see(KEY, ())
        assert downloads.commits(KEY) == {}
        await downloads.stop()
        await task

    run(main())


def test_pods_without_a_download_are_ignored() -> None:
    async def main() -> None:
        store, source = Store(), Log()
        downloads = Downloads(store, source, lambda key: None)
        task = asyncio.create_task(downloads.run())
        store.put({**pod("a", 1), "status": {}})
        downloads.see(KEY, store.pool_children("n", "p"))
        await asyncio.sleep(30)
        assert source.reads == 0
        await downloads.stop()
        await task

    run(main())
