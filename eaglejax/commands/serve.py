"""`eaglejax serve`: an HTTP server that speaks the OpenAI API."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from eaglejax.commands.options import model_options

if TYPE_CHECKING:
    from eaglejax.engine.engine import Engine

# The running request may take this long after SIGTERM; container platforms usually give 30 in all.
DRAIN_SECONDS = 20


@click.command(context_settings={"show_default": True})
@model_options
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", default=8000, type=click.IntRange(0, 65535), help="0: any free one.")
@click.option("--allow-remote", is_flag=True, help="Let --host be reachable from other machines.")
@click.option("--served-model-name", help="Name in requests; by default the model's own.")
@click.option("--max-queue", default=64, type=click.IntRange(min=0), help="Requests that may wait.")
@click.option(
    "--max-length", default=2048, type=click.IntRange(min=2), help="Tokens of one request, in all."
)
def serve(**options: Any) -> None:
    """Serve the model over HTTP, one request at a time."""
    listener = listen(options["host"], options["port"], options["allow_remote"])
    with listener:
        _serve(listener, options)


def listen(host: str, port: int, allow_remote: bool) -> socket.socket:
    """A socket that is bound before models are loaded.

    Raises:
        click.ClickException: the address cannot be used, or should not be.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise click.ClickException(f"--host {host}: {error.strerror}") from error
    family, *_, address = found[0]
    if not ipaddress.ip_address(address[0]).is_loopback and not allow_remote:
        raise click.ClickException(
            f"--host {host} can be reached from other machines, and the server has no API keys "
            "yet: anyone there could use it. Give --allow-remote if that is what you want"
        )
    try:
        return socket.create_server(address[:2], family=family, backlog=512)
    except OSError as error:
        raise click.ClickException(
            f"--host {host} --port {port}: cannot be listened on: {error.strerror}"
        ) from error


def _serve(listener: socket.socket, options: dict[str, Any]) -> None:
    """Runs until a signal, or until the engine fails to start."""
    try:
        import uvicorn

        from serving.app import create_app
        from serving.worker import Worker
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed: pip install 'eaglejax[serve]'"
        raise click.ClickException(message) from error
    from eaglejax.config import EngineConfig, SpecPlan

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            # The second signal ends the process at once; uvicorn does that for SIGINT only.
            super().handle_exit(signal.SIGINT if self.should_exit else sig, frame)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            worker.drain()
            await super().shutdown(sockets)

    name = options["served_model_name"] or Path(options["model"]).stem
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    fields: dict[str, Any] = {
        "max_slots": 1,
        "max_length": options["max_length"],
        "plan": SpecPlan.parse(options["plan"]),
        "spec_disable_batch_threshold": options["spec_disable_batch_threshold"],
        "kernels": options["kernels"],
        "weights": options["weights"],
        "activations": options["activations"],
    }
    if options["spec"] is not None:
        fields["spec"] = options["spec"]
    EngineConfig(**fields)  # what is wrong with it is better said now than by the thread

    def build() -> Engine:
        started = time.monotonic()
        engine = open_engine(options["model"], options["drafter"], fields)
        seconds = time.monotonic() - started
        c = engine.config
        _say(
            f"{name}: ready after {seconds:.1f} s: spec {c.spec}"
            + (f", plan {c.plan}" if c.spec != "off" else "")
            + f", kernels {c.kernels}, weights {c.weights}, activations {c.activations}"
            + f", max length {c.max_length}"
        )
        return engine

    def give_up() -> None:
        server.should_exit = True

    worker = Worker(build, max_queue=options["max_queue"], start_failed=give_up)
    server = Server(
        uvicorn.Config(
            create_app(worker, name),
            lifespan="on",
            ws="none",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
    )
    # uvicorn ends gracefully, then raises the signal again for whoever handled it before.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    _say(f"{name}: listening on {url}, loading")
    code: Any = 0
    try:
        server.run(sockets=[listener])
    except SystemExit as end:
        code = end.code
    else:
        if worker.error is not None:
            raise worker.error
    if worker.alive:
        # It is inside a compilation or a step, which nothing can interrupt: leaving the ordinary
        # way would take Python and XLA apart under it.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def open_engine(model: str, drafter: str, fields: dict[str, Any]) -> Engine:
    """Loads and starts an engine, and compiles all that requests will need."""
    from eaglejax.api import load
    from eaglejax.config import SamplingParams

    engine = load(model, drafter=None if drafter == "none" else drafter, **fields)
    for size in engine.config.prefill_chunks:
        if size + 2 <= engine.config.max_length:
            for temperature in (0.0, 1.0):
                params = SamplingParams(temperature, max_tokens=2, ignore_eos=True)
                engine.generate([[0] * size], params)
    return engine


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _leave(number: int, frame: Any) -> NoReturn:
    sys.exit(0)
