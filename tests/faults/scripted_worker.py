"""A worker process that is real but for its engine's model: `python scripted_worker.py SETTINGS_JSON [SABOTAGE]`.

And a prompt that begins with READER_ENDS ends the process as it is turned into tokens.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from model.tokenizer import Tokenizer
from tests.faults.sabotage import SABOTAGES
from worker import intake
from worker.engine_client import EngineClient, ProcessEngine, ProgressCallback
from worker.engine_config import EngineConfig
from worker.errors import StartupError
from worker.logs import configure_logging
from worker.protocol import GenerateRequest
from worker.service import Service
from worker.settings import load_settings

ENGINE_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("scripted_engine.py")))


def make_engine(config: EngineConfig, progress: ProgressCallback | None) -> EngineClient:
    """An engine process of the made-up model."""
    return ProcessEngine(config, progress, ENGINE_COMMAND)


READER_ENDS = "the end of who reads this"
prompt_ids_of = intake.prompt_ids_of


def read_or_end(request: GenerateRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
    """As `prompt_ids_of` does, unless the prompt is such a one."""
    if (request.prompt or "").startswith(READER_ENDS):
        os.kill(os.getpid(), signal.SIGKILL)
    return prompt_ids_of(request, tokenizer)


def main() -> None:
    """Serve until told to stop."""
    settings = load_settings(json.loads(sys.argv[1]))
    intake.prompt_ids_of = read_or_end
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
