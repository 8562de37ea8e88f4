"""Settings of the OpenMP runtime, which reads the environment once, when torch is imported."""

import os

# How long an OpenMP thread that waits for the others spins before it sleeps. Measured on two cores: 1000 costs an idle
# machine nothing (a step of one sequence 22 ms either way), and where one other process wants a core it is seven times
# faster than the runtime's own choice, whose spinning threads are preempted for whole time slices (17 against 2.5
# tokens/s). docs/log.md has the table.
SPIN_COUNT = "1000"


def limit_spinning() -> None:
    """Let waiting threads sleep soon, unless the user has said otherwise. Only of effect before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
