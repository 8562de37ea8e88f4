"""The service: Redis, processes, signals, text and time. Names load lazily, so that importing `worker` is cheap."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scheduler.sampling_params import SamplingParams
    from worker.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from worker.openmp import limit_spinning

        limit_spinning()
        from worker.llm import LLM

        return LLM
    if name == "SamplingParams":
        from scheduler.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'worker' has no attribute {name!r}")
