"""A local server for the lifetime of this program, like SGLang's `Runtime`."""

from __future__ import annotations

import atexit
import socket
import subprocess
import sys
import time
from typing import Any, Final

from treeline_lang import background
from treeline_lang.backends.base import Call
from treeline_lang.backends.runtime import RuntimeEndpoint
from treeline_lang.errors import BackendError, Unreachable
from treeline_lang.transcript import Prompt

_FLAGS: Final = {"log_level": "error", "metrics_port": 0, "admin_port": 0, "no_events": True}


class Runtime(RuntimeEndpoint):
    """`treeline serve` in a child process, ended by `shutdown` or with this process."""

    def __init__(self, model_path: str, *, launch_timeout: float = 300.0, **flags: Any) -> None:
        """flags: flags of `treeline serve`, with `_` for `-`. Returns when the server is ready. Raises Unreachable if
        it ends early or is not ready within launch_timeout seconds; its output is on standard error."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = flags.pop("port", free.getsockname()[1])
        argv = [sys.executable, "-m", "treeline_runtime", "--model", str(model_path), "--port", str(port)]
        for name, value in (_FLAGS | flags).items():
            flag = f"--{name.replace('_', '-')}"
            argv += [flag] if value is True else [] if value is None or value is False else [flag, str(value)]
        super().__init__(f"http://127.0.0.1:{port}", api_key=flags.get("api_key"))
        self._process = subprocess.Popen(argv)
        atexit.register(self.shutdown)
        deadline = time.monotonic() + launch_timeout
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.shutdown()
                raise Unreachable(f"the server of {model_path} did not start (status {self._process.returncode})")
            time.sleep(0.1)

    @property
    def endpoint(self) -> RuntimeEndpoint:
        return self

    def _is_ready(self) -> bool:
        try:
            background.call(self.warm(Prompt("ready?"), Call()))
        except BackendError:
            return False
        return True

    def shutdown(self) -> None:
        """Idempotent."""
        atexit.unregister(self.shutdown)
        self.close()
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
