"""A worker process that is real but for its engine's model: `python scripted_worker.py SETTINGS_JSON [SABOTAGE]`."""

import asyncio
import json
import sys
from pathlib import Path

from tests.faults.sabotage import SABOTAGES
from worker.engine_client import EngineClient, ProcessEngine, ProgressCallback
from worker.engine_config import EngineConfig
from worker.errors import StartupError
from worker.logs import configure_logging
from worker.service import Service
from worker.settings import load_settings

ENGINE_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("scripted_engine.py")))


def make_engine(config: EngineConfig, progress: ProgressCallback | None) -> EngineClient:
    """An engine process of the made-up model."""
    return ProcessEngine(config, progress, ENGINE_COMMAND)


def main() -> None:
    """Serve until told to stop."""
    settings = load_settings(json.loads(sys.argv[1]))
    for name in sys.argv[2:]:
        SABOTAGES[name]()
    configure_logging(settings.log_level, settings.log_format)
    try:
        asyncio.run(Service(settings, make_engine=make_engine).run())
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
