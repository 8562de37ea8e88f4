"""`/metrics`, `/healthz` and `/readyz` over plain HTTP, from threads of their own: a busy event loop still answers.

It is the WSGI application of prometheus-client behind the standard library's server: no framework, three fixed
answers. It has no authentication, so it listens on loopback unless it is told otherwise.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from worker.errors import StartupError

# Seconds that a client may take to send its request, so that a stalled one gives its thread back.
_REQUEST_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Health:
    """What `/healthz` or `/readyz` answers: 200 if `is_ok`, else 503. `reason` and `details` say why, as JSON."""

    is_ok: bool
    reason: str = "ok"
    details: Mapping[str, Any] = field(default_factory=dict)


HealthCheck = Callable[[], Health]


class StatusServer:
    """Serves the three paths until `close`.

    `is_alive` answers `/healthz` (false: restart me), `is_ready` answers `/readyz` (false: send me no work yet).
    Both are called from the server's threads, so they must only read, and never block.
    """

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, is_alive: HealthCheck, is_ready: HealthCheck
    ) -> None:
        """Bind and begin to serve. Raises StartupError if the address can't be had."""
        self._metrics = make_wsgi_app(registry)
        self._checks = {"/healthz": is_alive, "/readyz": is_ready}
        try:
            self._server = _Server(host, port)
        except (OSError, OverflowError) as error:
            raise StartupError(
                f"can't listen on {host}:{port} for metrics ({_reason(error)}): "
                "choose another --metrics-port, or 0 for any free one"
            ) from error
        self._server.set_app(self._answer)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="status-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; answers under way are given up."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _send(start_response, "405 Method Not Allowed", {"reason": "use GET"})
        if path == "/metrics":
            page: Iterable[bytes] = self._metrics(environ, start_response)
            return page
        if path in self._checks:
            health = self._checks[path]()
            status = "200 OK" if health.is_ok else "503 Service Unavailable"
            return _send(start_response, status, {"ok": health.is_ok, "reason": health.reason, **health.details})
        return _send(start_response, "404 Not Found", {"reason": "try /metrics, /healthz or /readyz"})


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        """Bind and listen; over IPv6 where `host` is such an address."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking DNS for the host's own name, which can take seconds and is of no use here."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that broke off or sent nothing in time; by default a traceback is printed."""


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a probe every few seconds would drown the log."""


def _send(start_response: StartResponse, status: str, body: Mapping[str, Any]) -> Iterable[bytes]:
    content = json.dumps(body).encode() + b"\n"
    start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(content)))])
    return [content]


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
