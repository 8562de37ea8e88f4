"""Jobs that end whatever computes them, for the made-up model: what they do, and when, is in the job's id.

    engine-at-7       once it has seven tokens the engine process kills itself (SIGKILL)
    x-worker-at-0     before its first token, and the service process too

Other deeds: `abort` (SIGABRT), `exit` (an exit code), `error` (an exception of the engine's own), `hang`.
"""

import os
import re
import signal
import time

_DEED = re.compile(r"(?:^|[/-])(engine|worker|abort|exit|error|hang)-at-(\d+)")
FOREVER_S = 3600.0


def strike(seq_id: str, num_generated: int) -> None:
    """Do what `seq_id` says, if a sequence of that name has `num_generated` tokens and that is its time."""
    deed = _DEED.search(seq_id)
    if deed is None or num_generated < int(deed[2]):
        return
    match deed[1]:
        case "engine":
            os.kill(os.getpid(), signal.SIGKILL)
        case "worker":
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        case "abort":
            os.kill(os.getpid(), signal.SIGABRT)
        case "exit":
            os._exit(7)
        case "error":
            raise RuntimeError(f"{seq_id} is poison")
        case "hang":
            time.sleep(FOREVER_S)
