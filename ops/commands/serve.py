"""`pagemill serve`: the worker. Every setting is a flag, made from the settings class."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from pydantic import SecretStr

from ops.first_message import show_start
from ops.progress import ProgressReporter, progress_reporter
from ops.settings_doc import accepted_by, is_switch
from ops.stopping import clearing_up
from worker.dummy_model import find_dummy_model
from worker.embedded import EmbeddedServer
from worker.errors import StartupError
from worker.logs import configure_logging, is_json, say
from worker.settings import DEMO_MODEL, Settings, load_settings, misspelt_variables, shown_default
from worker.settings_words import env_name, flag_name


def _setting_options() -> list[click.Parameter]:
    """One flag for each setting. Values are passed on as typed: the settings class judges them."""
    options: list[click.Parameter] = []
    for name, field in Settings.model_fields.items():
        flag = flag_name(name)
        text = f"{field.description}  [default: {shown_default(name)}; env: {env_name(name)}]"
        if is_switch(field):
            options.append(click.Option([f"{flag}/--no-{flag[2:]}", name], default=None, help=text))
        else:
            words = accepted_by(field)
            metavar = words.replace(", ", "|") if ", " in words else words.replace(" ", "-").upper()
            options.append(click.Option([flag, name], metavar=metavar, help=text))
    return options


def _serve(first_message: str | None, **flags: Any) -> None:
    """Run a worker until it is told to stop; a second signal doesn't wait for running jobs.

    SIGINT (Ctrl-C), SIGTERM and SIGHUP stop it at any time, also while it starts: exit code 0. Without --redis-url an
    embedded Valkey is started beside it and stopped with it; one that is killed is started again, on the same data.
    """
    settings = load_settings({name: value for name, value in flags.items() if value is not None})
    configure_logging(settings.log_level, settings.log_format)
    for variable, meant in misspelt_variables():
        words = f"pagemill: {variable} is not a setting; did you mean {meant}?"
        say(words, "variable_misspelt", "warning", variable=variable, meant=meant)
    try:
        with progress_reporter() as progress:
            model_path = find_model(settings, progress)
            with server_for(settings, progress) as (url, server):
                settings = settings.model_copy(update={"redis_url": SecretStr(url)})
                asyncio.run(_run_service(settings, model_path, progress, first_message, server))
                clearing_up()
    except KeyboardInterrupt:
        _tell_stopped()
        raise
    _tell_stopped()


def _tell_stopped() -> None:
    if sys.stderr.isatty() and not is_json():
        click.echo("Stopped.", err=True)


async def _run_service(
    settings: Settings,
    model_path: Path,
    progress: ProgressReporter,
    first_message: str | None,
    server: EmbeddedServer | None,
) -> None:
    """Serve until the service says that it has stopped; it handles the signals itself."""
    progress("starting the worker", 0, 0)
    from worker.service import Service, ServiceInfo

    def ready(info: ServiceInfo) -> None:
        progress("starting the worker", 1, 1)
        progress.close()
        greetings.append(asyncio.create_task(show_start(settings, first_message, info.metrics_url, service)))

    greetings: list[asyncio.Task[None]] = []
    service = Service(
        settings,
        model_path=model_path,
        progress=progress,
        on_stop=lambda num_jobs, is_again: tell_stop(num_jobs, is_again, settings),
    )
    parts = [asyncio.create_task(service.run(ready))]
    if server is not None:
        parts.append(asyncio.create_task(server.keep_running()))
    try:
        ended, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for part in ended:
            part.result()
    finally:
        for task in (*parts, *greetings):
            task.cancel()
        await asyncio.gather(*parts, *greetings, return_exceptions=True)


def tell_stop(num_jobs: int, is_again: bool, settings: Settings) -> None:
    """Say at once what a stop waits for, and how to end the waiting; told again, that it waits no longer."""
    words = "Stopping."
    if num_jobs:
        jobs = "1 running job" if num_jobs == 1 else f"{num_jobs} running jobs"
        grace = f"{jobs} may take {settings.shutdown_grace_s:g} s more. Ctrl-C again ends now"
        words = "Stopping now" if is_again else f"Stopping: {grace}"
        words += "; what is unfinished stays in the queue."
    say(f"\n{words}", "stop_asked_for", num_jobs=num_jobs, is_again=is_again, message=words)


def find_model(settings: Settings, progress: ProgressReporter) -> Path:
    """The model's folder or file; the demo model is fetched first. Raises StartupError if there is none."""
    if settings.load_format == "dummy":
        return find_dummy_model(settings.model)
    if settings.model == DEMO_MODEL and not Path(DEMO_MODEL).exists():
        from worker.demo_model import ensure_demo_model

        return ensure_demo_model(settings.cache_dir, progress)
    path = Path(settings.model).expanduser()
    if not path.exists():
        raise StartupError(
            f"no model at {path}: name a folder with config.json and safetensors, a GGUF file, or {DEMO_MODEL}"
        )
    return path


@contextmanager
def server_for(settings: Settings, progress: ProgressReporter) -> Iterator[tuple[str, EmbeddedServer | None]]:
    """URL of the server to work with: the one that is set, or an embedded one, which lives as long as the block."""
    if settings.redis_url is not None:
        yield settings.redis_url.get_secret_value(), None
        return
    with EmbeddedServer(settings.data_dir, progress=progress) as server:
        yield server.url, server


command = click.Command(
    "serve",
    callback=_serve,
    help=_serve.__doc__,
    params=[
        click.Option(
            ["--first-message"], metavar="TEXT", help="Send one chat message after the start, show the reply."
        ),
        *_setting_options(),
    ],
)
