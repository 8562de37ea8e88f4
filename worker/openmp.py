"""Settings of the OpenMP runtime, which reads the environment once, when torch is imported."""

import os

# How long an OpenMP thread that waits for the others spins before it sleeps. The compiled kernels have threads of their
# own, but torch's operators in between wake OpenMP's, which would otherwise spin for milliseconds in the kernels' way.
# docs/log.md has the figures.
SPIN_COUNT = "1000"


def limit_spinning() -> None:
    """Let waiting threads sleep soon, unless the user has said otherwise. Only of effect before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
