"""Measure what an image in a request costs the picker. Prints JSON rows {metric, value, unit}.

    python epp/benchmarks/images.py [MODEL] [--requests 100]

A chat with one image of 1 MiB (1.4 MB of base64) and a chat with one of 64 bytes take turns in a picker in memory, as
Envoy sends them when it buffers bodies: headers, then the body in one message. Each is another image, whose count of
tokens the picker knows, and its key is matched and predicted. Processor time of the event loop, from the body's arrival
to the answer: `picker.image_ms` is the difference of the medians, `picker.image_turn_ms` the longest that another task
would have waited for its turn, in 99 of 100 requests.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import statistics
import sys
import time
from pathlib import Path

from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.extproc.session import ExtProcSession, SessionLimits
from treeline_epp.metrics import Metrics
from treeline_epp.picking.picker import Picker
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.router import Router
from treeline_wire import envoy_pb2 as pb
from treeline_wire.media import MediaSpec, item_digest
from treeline_wire.tokenizer import TokenizerBundle

LARGE, SMALL = 1 << 20, 64
PAD, PROCESSOR, COUNT = "<|endoftext|>", "processor", 1024
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}" + PAD + "{% "
    "else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


class World:
    """A picker with two endpoints of a model that takes images."""

    def __init__(self, model: Path) -> None:
        registry, picker = ModelRegistry(), Picker()
        tokenizer = TokenizerBundle.from_dir(model).tokenizer_json
        media = MediaSpec({"image": PAD}, PROCESSOR)
        self.keyer = registry.add_keyer(TokenizerBundle.build(tokenizer, chat_template=TEMPLATE, media=media))
        for name, address in (("a", "10.0.0.1:8000"), ("b", "10.0.0.2:8000")):
            registry.set_endpoint(name, "default", ("vl",), self.keyer.fingerprint)
            picker.add_endpoint(EndpointSpec(name, address, models=("vl",)))
        self.router = Router(picker, registry, Metrics())
        self.rng = random.Random(1)

    def request_ms(self, size: int) -> tuple[float, float]:
        """Return the time of a request with a new image, and its longest turn, in ms."""
        assert self.keyer.media is not None
        image = self.rng.randbytes(size)
        self.keyer.media.learn(item_digest("image", image, PROCESSOR), COUNT)
        url = "data:image/png;base64," + base64.b64encode(image).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
        body = json.dumps({"model": "vl", "messages": [{"role": "user", "content": parts}]}).encode()
        head = pb.ProcessingRequest()
        head.protocol_config.request_body_mode = pb.ProcessingMode.BUFFERED
        for name, value in ((":path", "/v1/chat/completions"), (":method", "POST")):
            head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        message = pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True)).SerializeToString()
        stream = ExtProcSession(self.router, SessionLimits(64 << 20))
        for _ in stream.answers(head.SerializeToString()):
            pass
        turns, begun = [], time.thread_time()
        for _ in stream.answers(message):
            turns.append(time.thread_time() - begun)
            begun = time.thread_time()
        turns.append(time.thread_time() - begun)
        stream.close()
        return sum(turns) * 1e3, max(turns) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=Path(__file__).parents[2] / "models" / "tiny")
    parser.add_argument("--requests", type=int, default=100)
    args = parser.parse_args()
    world = World(args.model)
    times: dict[int, list[tuple[float, float]]] = {LARGE: [], SMALL: []}
    for number in range(args.requests + 5):
        for size in (LARGE, SMALL):
            took = world.request_ms(size)
            if number >= 5:
                times[size].append(took)
    large, small = (statistics.median(took for took, _ in times[size]) for size in (LARGE, SMALL))
    longest = sorted(turn for _, turn in times[LARGE])
    for metric, value in (("image_ms", large - small), ("image_turn_ms", longest[len(longest) * 99 // 100])):
        sys.stdout.write(json.dumps({"metric": f"picker.{metric}", "value": round(value, 3), "unit": "ms"}) + "\n")


if __name__ == "__main__":
    main()
