"""A run of `treeline up`: the checks before anything starts, the printed text, and the clean-up at the end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
from rich.console import Console
from treeline_operator.envoy import EnvoyConfig, bootstrap_json
from treeline_operator.envoy.binary import EnvoyNotFound, envoy_binary
from treeline_wire.command_line import ended_at_once

from treeline.main import how_to_install, missing_parts
from treeline.printable import printable
from treeline.up import picker_page
from treeline.up.plan import UpOptions, busy_ports, gateway_url, plan
from treeline.up.progress import show
from treeline.up.supervisor import ChildFailed, Supervisor

PROBE = "~treeline-up"
"""The client name of readiness probes, which no API key can have."""


def envoy_config(options: UpOptions) -> EnvoyConfig:
    return EnvoyConfig(
        listen_host=options.host,
        listen_port=options.port,
        ext_proc_port=options.ext_proc_port,
        eds_port=options.eds_port,
        console_port=options.picker_admin_port if options.console else None,
        api_keys={**options.api_keys, PROBE: options.probe_key} if options.api_keys else None,
        isolation=options.isolation,
        expose_cached_tokens=options.expose_routing,
        add_endpoint_header=options.expose_routing,
        tracing=options.tracing,
    )


def _model(options: UpOptions) -> str:
    """A name that clients can ask for: of engines that run already, the first that the picker lists."""
    if not options.engines:
        from treeline_runtime.download import repository

        return options.served_model_name or (
            Path(options.model).name if Path(options.model).exists() else repository(options.model)
        )
    with contextlib.suppress(httpx.HTTPError, *picker_page.UNREADABLE):
        page = httpx.get(picker_page.url(options.picker_admin_port), timeout=2.0, trust_env=False).content
        listed = (model for pool in picker_page.read(page).pools.values() for model in pool.models)
        return printable(next(listed, "NAME"))
    return "NAME"


def _how_to_try(options: UpOptions) -> str:
    url = gateway_url(options)
    model = json.dumps(_model(options)).replace("'", r"\u0027")
    key = " -H 'authorization: Bearer …'" if options.api_keys else ""
    page = f"in a browser: {url}/console/ {_what_the_console_shows(options)}\n\nor:" if options.console else "try:"
    return f"""ready: {url}

{page}
  curl -i {url}/v1/chat/completions -H 'content-type: application/json'{key} \\
    -d '{{"model": {model}, "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'

{_pages(options)}
stop: Ctrl-C"""


def _what_the_console_shows(options: UpOptions) -> str:
    """Return which parts of the console the address shows: only chat if other machines reach the gateway."""
    if ipaddress.ip_address(options.host).is_loopback:
        return "(chat, load, decisions)"
    return f"(chat; load and decisions on this machine alone: http://127.0.0.1:{options.picker_admin_port}/console/)"


def _pages(options: UpOptions) -> str:
    picker = f"metrics: http://127.0.0.1:{options.metrics_port}/metrics (picker)"
    if options.engines:
        names = ", ".join(engine.name for engine in options.engines)
        return f"{picker}\nhow requests are routed to {names}: http://127.0.0.1:{options.picker_admin_port}/endpoints"
    return f"""{picker}, http://127.0.0.1:{options.runtime_metrics_port}/metrics (runtime-0)
administration: http://127.0.0.1:{options.runtime_admin_port} (runtime-0)"""


class _Refused(Exception):
    """Nothing was started; the message says why."""


MOST_LINES = 10
"""The most ports that an error lists."""


def _check(options: UpOptions) -> None:
    """Check the ports, then the model, before anything starts. A model that is not here is downloaded.

    Raises _Refused, EnvoyNotFound; exits with status 2 for arguments that `treeline serve` does not take.
    """
    children = plan(options, envoy_binary(), Path())
    if busy := busy_ports(children):
        fix = "Stop what holds a port, or take others: --port-base 9100 moves all of them, --port the gateway's."
        more = [f"and {len(busy) - MOST_LINES} more"] if len(busy) > MOST_LINES else []
        raise _Refused("\n".join((*busy[:MOST_LINES], *more, fix)))
    if options.engines:
        return
    if missing := missing_parts(("runtime",)):
        raise _Refused(f"a model needs the runtime: {how_to_install(missing)}; or name running servers: --engine")
    from treeline_runtime.args import parse_args
    from treeline_runtime.download import ModelNotFound
    from treeline_runtime.frontend import ServeError
    from treeline_runtime.serve import checked_model

    _, _, _, *arguments = children[0].argv  # python -m treeline_runtime
    try:
        checked_model(parse_args(arguments), copies=options.replicas)
    except (ModelNotFound, ServeError) as error:
        raise _Refused(str(error)) from None


async def _run(options: UpOptions, folder: Path, log_dir: Path, console: Console) -> int:
    bootstrap = folder / "envoy.json"
    children = plan(options, envoy_binary(), bootstrap)
    bootstrap.touch(mode=0o600)  # keys are in it
    bootstrap.write_text(bootstrap_json(envoy_config(options)))
    supervisor = Supervisor(children, log_dir)
    progress = asyncio.create_task(show(supervisor.children, console))
    try:
        status = await supervisor.run(on_ready=lambda: print(_how_to_try(options), flush=True))
    except ChildFailed as failure:
        progress.cancel()
        await asyncio.gather(progress, return_exceptions=True)
        console.print(f"treeline up: {failure}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    finally:
        progress.cancel()
        await asyncio.gather(progress, return_exceptions=True)
    console.print("stopped", highlight=False)
    return status


def _sweep() -> None:
    """Remove the folders of killed processes, which contain keys. Nobody holds their locks."""
    for old in Path(tempfile.gettempdir()).glob(f"{_WORKPLACE}*"):
        with contextlib.suppress(OSError):
            if old.lstat().st_uid == os.getuid():
                with (old / _LOCK).open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(old)


@contextlib.contextmanager
def _workplace() -> Iterator[Path]:
    """A folder of our own, gone at the end."""
    with tempfile.TemporaryDirectory(prefix=_WORKPLACE) as made, (Path(made) / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(made)


_WORKPLACE = "treeline-up-"
_LOCK = "lock"


def up(options: UpOptions, log_dir: Path | None) -> int:
    """Returns the exit status of `treeline up`."""
    console = Console(stderr=True)
    try:
        _sweep()
        with ended_at_once():
            _check(options)
        with _workplace() as folder:
            return asyncio.run(_run(options, folder, log_dir or folder, console))
    except (EnvoyNotFound, _Refused) as error:
        console.print(f"treeline up: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
