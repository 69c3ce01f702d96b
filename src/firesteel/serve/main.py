"""``firesteel serve``: the API process. It listens, supervises the engine's process, and drains."""

from __future__ import annotations

import logging
import resource
import socket
import ssl
import sys
import time
from types import FrameType

import uvicorn
from prometheus_client import disable_created_metrics

from firesteel import __version__
from firesteel.serve.app import ServeOptions, Server, create_app
from firesteel.serve.client import EngineClient, EngineState
from firesteel.serve.messages import ModelInfo
from firesteel.serve.options import Launch
from firesteel.serve.supervisor import EngineProcess
from firesteel.serve.tracing import open_tracer

log = logging.getLogger("firesteel.serve")

# seconds an idle connection stays open: longer than clients keep theirs, so that they close first
# and never send into a connection that is just being closed
KEEP_ALIVE = 75
OPEN_FILES = 65536  # a connection is one; the usual soft limit of 1024 is less than a load test opens


class DrainingServer(uvicorn.Server):
    """First SIGTERM or SIGINT: no new requests, running ones may end. Second: at once.

    The port stays open while it drains, so that probes and balancers see 503.
    """

    def __init__(self, config: uvicorn.Config, server: Server, client: EngineClient, seconds: float) -> None:
        super().__init__(config)
        self._server, self._client, self._seconds = server, client, seconds
        self._deadline = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets=sockets)
        scheme = "https" if self.config.is_ssl else "http"
        for each in (s for server in self.servers for s in server.sockets):
            host, port = each.getsockname()[:2]
            log.info("listening on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signal."""
        if self._server.draining:
            self.should_exit = self.force_exit = True
            return
        self._server.draining = True
        self._deadline = time.monotonic() + self._seconds
        log.info("draining: %d requests are open", self._client.open_requests)

    async def on_tick(self, counter: int) -> bool:
        """Every 0.1 s: leave when drained, when out of patience, or when the engine can never start."""
        drained = self._client.open_requests == 0 or time.monotonic() > self._deadline
        if (self._server.draining and drained) or self._client.state is EngineState.FAILED:
            self.should_exit = True
        return await super().on_tick(counter)


def run_serve(launch: Launch) -> int:
    """Serve until a signal; 2 if the engine cannot start."""
    logging.basicConfig(
        level=launch.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    for note in launch.notes:
        log.info("%s", note)
    disable_created_metrics()
    _allow_connections()
    client = EngineProcess(launch.model, launch.settings, launch.watchdog_seconds)
    options = ServeOptions(
        launch.names,
        launch.api_keys,
        launch.max_request_bytes,
        launch.cors_origins,
        open_tracer(launch.otlp_endpoint, __version__),
    )
    servers: list[Server] = []
    app = create_app(client, options, servers.append)
    _log_engine(client, servers[0])
    config = uvicorn.Config(
        app,
        host=launch.host,
        port=launch.port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=KEEP_ALIVE,
        ssl_certfile=launch.tls.get("ssl_certfile"),
        ssl_keyfile=launch.tls.get("ssl_keyfile"),
        ssl_ca_certs=launch.tls.get("ssl_ca_certs"),
        ssl_cert_reqs=ssl.CERT_REQUIRED if "ssl_ca_certs" in launch.tls else ssl.CERT_NONE,
    )
    server = DrainingServer(config, servers[0], client, launch.drain_seconds)
    server.run()
    if client.failure is not None:
        print(f"firesteel: {client.failure}", file=sys.stderr)
        return 2
    return 0 if server.started else 1


def _allow_connections() -> None:
    """Raise the soft limit of open files as far as the hard one lets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _log_engine(client: EngineClient, server: Server) -> None:
    """Progress, and what was chosen, in the log."""
    into_metrics = client.on_ready

    def ready(info: ModelInfo) -> None:
        into_metrics(info)
        for note in info.notes:
            log.info("%s", note)
        names = ", ".join(server.options.names)
        log.info("ready: %s from %s, at most %d tokens per request", names, info.path, info.max_model_len)

    client.on_ready = ready
    client.on_progress = lambda part: log.debug("loading %s", part)
