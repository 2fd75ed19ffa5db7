"""The picker's own server on a real socket: its loop is watched while another process sends hostile bodies."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from pathlib import Path

import pytest
from epp.io.test_large_bodies import HOSTILE, TURN, new_router
from support.cpu import reference_s
from treeline_epp.extproc.http2_server import Http2Server
from treeline_epp.extproc.session import SERVICE, ExtProcSession, SessionLimits, most_message_bytes

pytestmark = pytest.mark.deep

CLIENT = """
import sys, grpc
from treeline_wire import envoy_pb2 as pb
port, path, mode, body = sys.argv[1], sys.argv[2], int(sys.argv[3]), open(sys.argv[4], "rb").read()
head = pb.ProcessingRequest()
head.protocol_config.request_body_mode = mode
for key, value in ((":path", path), (":method", "POST")):
    head.request_headers.headers.headers.add(key=key, raw_value=value.encode())
size = len(body) if mode == 2 else 48_000
def messages():
    yield head
    for start in range(0, len(body), size):
        end = start + size >= len(body)
        yield pb.ProcessingRequest(request_body=pb.HttpBody(body=body[start:start + size], end_of_stream=end))
channel = grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.max_send_message_length", -1)])
call = channel.stream_stream(
    "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
    request_serializer=pb.ProcessingRequest.SerializeToString,
    response_deserializer=pb.ProcessingResponse.FromString,
)
print(sum(1 for _ in call(messages())))
"""
SHAPES = [
    "24 MB of text",
    "24 MB of brackets",
    "24 MB of messages",
    "240 KB of combining marks",
    "240 KB of messages",
    "240 KB of members",
    "nested kwargs that decode",
]


async def watch(longest: list[float]) -> None:
    """Measure the processor time of the loop's thread between two turns of this task."""
    before = time.thread_time()
    while True:
        await asyncio.sleep(0)
        now = time.thread_time()
        longest.append(now - before)
        before = now


@pytest.mark.parametrize("mode", [2, 4], ids=["buffered", "duplex"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_other_requests_are_served_while_a_hostile_body_arrives(shape: str, mode: int, tmp_path: Path) -> None:
    body, file = HOSTILE[shape](), tmp_path / "body"
    file.write_bytes(body)
    path = "/v1/chat/completions"
    limit = 64 << 20
    # 24 MB in one message are one copy: where the kernel has to find the pages one by one, that is 45 ms.
    most_s = reference_s() * TURN * (3 if mode == 2 and len(body) > 8 << 20 else 1)
    gc.collect()
    router, limits = new_router(), SessionLimits(limit)
    methods = {f"/{SERVICE}/Process": lambda fields: ExtProcSession(router, limits, fields)}
    server = Http2Server(methods, most_message_bytes(limit))
    await server.start("127.0.0.1", 0)
    worst = []
    try:
        for _ in range(3):  # a processor that is shared makes some turns longer
            argv = [sys.executable, "-c", CLIENT, str(server.port), path, str(mode), str(file)]
            sent = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
            turns: list[float] = []
            watching = asyncio.create_task(watch(turns))
            said, _ = await asyncio.wait_for(sent.communicate(), 120)
            watching.cancel()
            assert sent.returncode == 0
            assert int(said) >= 1, "it was answered"
            worst.append(max(turns))
            if worst[-1] < most_s:
                break
    finally:
        await server.stop(0)
    assert min(worst) < most_s, worst
