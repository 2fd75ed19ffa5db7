"""A scripted runtime: it answers at once, or with 500 while the test asks for that."""

from __future__ import annotations

from typing import Any, Final

BROKEN: Final = "/tmp/broken"
"""While this file is there, every request is answered with 500, and every probe with 200."""

_SCRIPT: Final = f"""import json, os, signal, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Engine(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def say(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        models = {{"object": "list", "data": [{{"id": "scripted", "object": "model"}}]}}
        known = {{"/ready": {{}}, "/live": {{}}, "/v1/models": models}}
        self.say(200 if self.path in known else 404, json.dumps(known.get(self.path, {{}})).encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if os.path.exists({BROKEN!r}):
            return self.say(500, b'{{"error": {{"message": "out of order", "type": "server_error"}}}}')
        delta = {{"index": 0, "delta": {{"content": "yes"}}, "finish_reason": "length"}}
        usage = {{"prompt_tokens": 1, "completion_tokens": asked["max_tokens"], "total_tokens": 1}}
        chunk = {{"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "scripted"}}
        chunks = [chunk | {{"choices": [delta]}}, chunk | {{"choices": [], "usage": usage}}]
        text = "".join(f"data: {{json.dumps(c)}}\\n\\n" for c in chunks) + "data: [DONE]\\n\\n"
        self.say(200, text.encode(), "text/event-stream")

    def log_message(self, *words):
        pass

signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
ThreadingHTTPServer(("", 8000), Engine).serve_forever()
"""

SCRIPT: Final[dict[str, Any]] = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "engine"},
    "data": {"engine.py": _SCRIPT},
}
"""Apply it before the pool."""
SCRIPTED: Final[dict[str, Any]] = {
    "model": {"uri": "builtin://tiny", "name": "scripted"},
    "engine": {"command": ["python3", "/engine/engine.py"]},
    "template": {
        "spec": {
            "containers": [{"name": "runtime", "volumeMounts": [{"name": "engine", "mountPath": "/engine"}]}],
            "volumes": [{"name": "engine", "configMap": {"name": "engine"}}],
        }
    },
}
"""The spec of a pool of such runtimes."""
