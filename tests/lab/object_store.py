"""S3 server of moto in a process of its own, which plants faults on request.

with serving() as store:
    store.plant(0.3, "slow down", "truncated")      # each request fails with this probability
    os.environ |= store.environment                 # for boto and s3fs
"""

import io
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
from werkzeug.test import Client

SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
OF_UPLOADS = ("truncated", "corrupted", "repeated", "lost answer")
FAULTS = (*OF_UPLOADS, "slow down", "time-out")
TIME_OUT_SECONDS = 1.5  # longer than the patience of clients with `environment`
BUCKET = "bucket"


class Faults:
    """WSGI application that plants faults in the requests to another one."""

    def __init__(self, app: Callable[..., Iterable[bytes]]):
        self.app, self.rate, self.kinds, self.random, self.planted = app, 0.0, FAULTS, random.Random(0), Counter[str]()
        self.idle, self.running = threading.Condition(), 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/faults":
            return self._configure(environ, start_response)
        with self.idle:
            self.running += 1
        try:
            return self._answer(environ, start_response)
        finally:
            with self.idle:
                self.running -= 1
                self.idle.notify_all()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        size = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(size) if size else b""
        kind = self.random.choice(self.kinds) if self.random.random() < self.rate else ""
        if kind in OF_UPLOADS and (environ["REQUEST_METHOD"] not in ("PUT", "POST") or not body):
            kind = ""
        self.planted[kind] += 1
        if kind == "slow down":
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [SLOW_DOWN]
        if kind == "time-out":
            time.sleep(TIME_OUT_SECONDS)
        if kind == "truncated":
            body = body[: len(body) // 2]
        if kind == "corrupted":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if kind in ("repeated", "lost answer"):
            b"".join(self.app(_with_body(environ, body), lambda *_: None))
        if kind == "lost answer":
            start_response("500 Internal Server Error", [("Content-Type", "text/plain")])
            return [b""]
        return self.app(_with_body(environ, body), start_response)

    def _configure(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        settings = json.loads(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)) or b"{}")
        if settings:
            with self.idle:  # a request whose client has given up is still to be executed, and not atomically, as on S3
                self.idle.wait_for(lambda: not self.running, 2 * TIME_OUT_SECONDS)
            self.rate, self.kinds = settings["rate"], tuple(settings["kinds"])
            self.random, self.planted = random.Random(settings["seed"]), Counter()
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(self.planted).encode()]


def _with_body(environ: dict[str, Any], body: bytes) -> dict[str, Any]:
    own = {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
    return {name: value for name, value in own.items() if not name.startswith("werkzeug.")}


@dataclass
class ObjectStore:
    """Running server."""

    port: int

    @property
    def environment(self) -> dict[str, str]:
        """Environment of clients: endpoint, credentials, and little patience."""
        options = {"config_kwargs": {"read_timeout": 1.0, "connect_timeout": 1.0, "retries": {"max_attempts": 1}}}
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "weft",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "FSSPEC_S3": json.dumps(options),
        }

    def plant(self, rate: float, *kinds: str, seed: int = 0) -> None:
        """Plant faults of these kinds, by default all, in this share of the requests from now on."""
        self._request({"rate": rate, "kinds": kinds or FAULTS, "seed": seed})

    def planted(self) -> dict[str, int]:
        """Requests since the last `plant`, by their fault; "" without one."""
        return json.loads(self._request({}))

    def _request(self, settings: dict[str, Any]) -> bytes:
        data = json.dumps(settings).encode() if settings else b""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/faults", data)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read()


@contextmanager
def serving() -> Iterator[ObjectStore]:
    """Server with one empty bucket, until the end of the block."""
    command = [sys.executable, "-m", "tests.lab.object_store"]
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root, text=True) as process:
        try:
            assert process.stdout is not None
            yield ObjectStore(int(process.stdout.readline()))
        finally:
            process.kill()


def main() -> None:
    """Serve on a free port, which is printed."""
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    app = Faults(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    _make_bucket(app.app)
    print(server.port, flush=True)
    server.serve_forever()


def _make_bucket(app: Callable[..., Iterable[bytes]]) -> None:
    signed = "AWS4-HMAC-SHA256 Credential=weft/20260101/us-east-1/s3/aws4_request"
    answer = Client(app).put(f"/{BUCKET}", headers={"Authorization": signed})
    assert answer.status_code == 200, answer.data


if __name__ == "__main__":
    main()
