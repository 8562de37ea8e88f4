"""A worker process that is real but for its engine's model: `python -m ops.bench.scripted_worker SETTINGS_JSON`.

Without the variable that says how long a step takes, its engine has the model, too.

Its one line on stdout, the worker's id, says that it takes jobs.
"""

import asyncio
import json
import os
import sys
from typing import Final

from ops.bench.scripted_engine import STEP_VARIABLE
from worker.engine_client import EngineClient, ProcessEngine, ProgressCallback
from worker.engine_config import EngineConfig
from worker.errors import StartupError
from worker.logs import configure_logging
from worker.service import Service
from worker.settings import load_settings

ENGINE_COMMAND: Final = (sys.executable, "-P", "-m", "ops.bench.scripted_engine")


def make_engine(config: EngineConfig, progress: ProgressCallback | None) -> EngineClient:
    """An engine process without a model."""
    return ProcessEngine(config, progress, ENGINE_COMMAND)


def main() -> None:
    """Serve until told to stop."""
    settings = load_settings(json.loads(sys.argv[1]))
    configure_logging(settings.log_level, settings.log_format)
    service = Service(settings, make_engine=make_engine) if STEP_VARIABLE in os.environ else Service(settings)
    try:
        asyncio.run(service.run(lambda info: print(info.worker_id, flush=True)))
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
