"""Read the load of a hundred engines from their metrics pages. Prints JSON rows {metric, value, unit}.

    python epp/benchmarks/scrape.py [--endpoints 100] [--seconds 15]

One other process plays all engines: an HTTP server on as many addresses of 127.0.0.0/8, each with a page of 100 KB as
vLLM writes it (`prometheus_client` makes it once, under vLLM's names). This process has the scrapers and a picker's
endpoints, whose reports they make, and nothing else; the figure is its CPU time. The run fails if an engine is not
read, or its report is not fresh.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

import uvloop
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from treeline_epp.endpoints.model_server_metrics import KNOWN
from treeline_epp.endpoints.scraper import Scraper, Scraping
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.picking.picker import Picker

PAGE_BYTES = 100_000
SETTLE_S = 3.0


class NotRead(Exception):
    """An engine was not read, or not in time."""


def page() -> bytes:
    """Return a page like vLLM's, filled up to size with histograms, which are most of its pages."""
    registry = CollectorRegistry()
    labels = {"model_name": "meta-llama/Llama-3.1-8B-Instruct", "engine": "0"}
    for name, value in (("num_requests_running", 3), ("num_requests_waiting", 2), ("kv_cache_usage_perc", 0.4)):
        Gauge(f"vllm:{name}", "As vLLM documents it.", list(labels), registry=registry).labels(**labels).set(value)
    cache = {"block_size": "16", "num_gpu_blocks": "27000", "cache_dtype": "auto", "engine": "0"}
    Gauge("vllm:cache_config_info", "Settings.", list(cache), registry=registry).labels(**cache).set(1)
    computed = Counter("vllm:prompt_tokens_by_source", "By source.", [*labels, "source"], registry=registry)
    for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
        computed.labels(**labels, source=source).inc(123456)
    names = ["request_prefill_time_seconds", "request_prefill_kv_computed_tokens", "inter_token_latency_seconds"]
    number = 0
    while True:
        for name in names:
            buckets = [2.0**power for power in range(-10, 13)]
            text = "Histogram of something that vLLM observes."
            made = Histogram(f"vllm:{name}", text, list(labels), buckets=buckets, registry=registry)
            made.labels(**labels).observe(0.7)
        if len(whole := generate_latest(registry)) >= PAGE_BYTES:
            return whole
        number += 1
        names = [f"request_other_{number}_seconds"]


def play(pipe: Connection) -> None:
    """Run the engines' process."""
    body = page()  # another page each time: a busy engine's metrics change between scrapes
    bodies = itertools.cycle([body, body.replace(b"123456.0", b"123457.0"), body.replace(b"123456.0", b"123458.0")])
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4\r\ncontent-length: %d\r\n\r\n" % len(body)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(head + next(bodies))
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "0.0.0.0", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.to_thread(pipe.recv)
        server.close()

    asyncio.run(run())


async def measure(count: int, port: int, seconds: float) -> dict[str, tuple[float, str]]:
    """Return the rows by metric. Raises `NotRead`."""
    picker, scraping = Picker(), Scraping()

    def scraper(spec: EndpointSpec) -> Scraper:
        return Scraper(spec.name, spec.address, scraping, lambda load, at: picker.on_load(spec.name, load, at))

    specs = [EndpointSpec(f"e{n}", f"127.1.{n >> 8}.{n & 255}:{port}") for n in range(1, count + 1)]
    scrapers = [scraper(spec) for spec in specs]
    for spec, one in zip(specs, scrapers, strict=True):
        picker.add_endpoint(spec)
        one.follow(KNOWN)
    tasks = [asyncio.create_task(one.run()) for one in scrapers]
    await asyncio.sleep(SETTLE_S)
    cpu_s, began, before = time.process_time(), time.monotonic(), scraping.scrapes
    await asyncio.sleep(seconds)
    cpu_s, took_s, reads = time.process_time() - cpu_s, time.monotonic() - began, scraping.scrapes - before
    now = time.monotonic()
    stale = [spec.name for spec in specs if not picker.endpoints[spec.name].load.fresh(now)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await scraping.http.close()
    if stale or scraping.failures:
        raise NotRead(f"no fresh report of {len(stale)} endpoints; failures: {dict(scraping.failures)}")
    return {
        f"scrape.cores.{count}": (cpu_s / took_s, "cores"),
        f"scrape.read_us.{count}": (cpu_s / reads * 1e6, "µs"),
        f"scrape.reads_s.{count}": (reads / took_s, "reads/s"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoints", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=15.0)
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    engines = multiprocessing.get_context("spawn").Process(target=play, args=(theirs,), daemon=True)
    engines.start()
    try:
        rows = uvloop.run(measure(arguments.endpoints, ours.recv(), arguments.seconds))
    finally:
        ours.send(None)
        engines.join(10)
    for metric, (value, unit) in rows.items():
        sys.stdout.write(json.dumps({"metric": metric, "value": round(value, 4), "unit": unit}) + "\n")


if __name__ == "__main__":
    main()
