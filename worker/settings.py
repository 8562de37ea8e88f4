"""Every setting of Pagemill, once: a default, a meaning, an environment variable and a flag for each.

A flag wins over the environment, the environment over the default. The environment is read here and nowhere else,
once, at start; what lies deeper gets plain frozen data, never this object.
"""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import platformdirs
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from scheduler.errors import InvalidConfigError
from scheduler.policy_names import DEFAULT_POLICY, parse_policy
from worker.engine_config import BLOCK_SIZES
from worker.errors import SettingsError
from worker.lane_weights import DEFAULT_LANE_WEIGHTS, parse_lane_weights
from worker.settings_words import ENV_PREFIX, env_name, problem_line

DEMO_MODEL = "smollm2"
# Token budget of a step where `max_num_batched_tokens` is not set. On the CPU a step of 6144 tokens takes many seconds.
BATCHED_TOKENS_CUDA = 6144
BATCHED_TOKENS_CPU = 512
NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"
REDIS_SCHEMES = (
    "redis://",
    "rediss://",
    "unix://",
    "redis+sentinel://",
    "rediss+sentinel://",
    "redis+cluster://",
    "rediss+cluster://",
)

_MIB = 2**20
_HOUR_MS = 3_600_000


def served_name(model: str) -> str:
    """The name that clients know a model by: the file or folder name, made to fit a queue name."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(model).name.removesuffix(".gguf")).strip("-")
    return name[:64] or "model"


def _block_size(value: int) -> int:
    if value not in BLOCK_SIZES:
        raise ValueError(f"use one of {', '.join(map(str, BLOCK_SIZES))}")
    return value


def _policy(value: str) -> str:
    try:
        return ",".join(parse_policy(value))
    except InvalidConfigError as error:
        # The setting's name is said already.
        raise ValueError(str(error).partition(": ")[2]) from error


def _redis_url(value: SecretStr) -> SecretStr:
    if not value.get_secret_value().startswith(REDIS_SCHEMES):
        raise ValueError(f"use a URL that begins with {', '.join(REDIS_SCHEMES)}")
    return value


def _lane_weights(value: str) -> str:
    parse_lane_weights(value)
    return value.strip()


def _queues(value: str) -> str:
    """Names with commas between them, without the spaces that were there."""
    names = [name.strip() for name in value.split(",")]
    for name in names:
        if not re.fullmatch(NAME_PATTERN, name):
            which = "" if len(names) == 1 else f"{name[:80]!r} is no name of a queue: "
            raise ValueError(f"{which}use 1 to 64 letters, digits, `_`, `.` or `-`")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is there more than once: name each queue once")
    return ",".join(names)


def _shown(text: str) -> dict[str, Any]:
    """What help and the settings table show as the default of a field whose default is worked out at start."""
    return {"shown_default": text}


def _path(value: Any) -> Any:
    """An empty path would be the current folder, which nobody asked for."""
    if value == "":
        raise ValueError("it must not be empty")
    return value


Folder = Annotated[Path, BeforeValidator(_path), AfterValidator(Path.expanduser)]
# A text among the annotations is the word for what is accepted.
TraceFile = Annotated[Path, BeforeValidator(_path), AfterValidator(Path.expanduser), "file"]


class Settings(BaseSettings):
    """The settings of a worker. Read-only; made by `load_settings`, which turns mistakes into one clear line."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
        validate_default=True,
        extra="forbid",
        frozen=True,
    )

    model: str = Field(default=DEMO_MODEL, min_length=1)
    """The model to serve: a folder with config.json and safetensors, a GGUF file, or `smollm2`, the demo model."""
    queue: Annotated[str, AfterValidator(_queues), "name[,name...]"] = Field(
        default_factory=lambda data: served_name(data["model"]),
        json_schema_extra=_shown("the model's name"),
    )
    """Queue that jobs are taken from, or several, which share the worker fairly: letters, digits, `_`, `.`, `-`."""
    redis_url: Annotated[SecretStr, AfterValidator(_redis_url)] | None = None
    """Redis or Valkey to work with: `redis://`, `rediss://`, `unix://`, `redis+sentinel://` or `redis+cluster://` \
(docs/deploying.md). Without it an embedded Valkey is started."""
    embedded: bool = Field(
        default_factory=lambda data: data["redis_url"] is None,
        json_schema_extra=_shown("on without `redis_url`"),
    )
    """Start an embedded Valkey. Turn it off where a forgotten `redis_url` must be an error."""
    data_dir: Folder = Field(
        default_factory=lambda: platformdirs.user_data_path("pagemill"),
        json_schema_extra=_shown("the user's data folder"),
    )
    """Folder of the embedded Valkey: its data, its lock and the file `redis.url`."""
    cache_dir: Folder = Field(
        default_factory=lambda: platformdirs.user_cache_path("pagemill"),
        json_schema_extra=_shown("the user's cache folder"),
    )
    """Folder for the demo model, converted weights and compiled kernels."""

    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` computes with random weights in the shapes of a config.json, or of a preset such as Llama-3.1-8B."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs. `auto` takes CUDA where there is a device."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and KV cache. `auto` is the checkpoint's own on CUDA and float32 on the CPU."""
    quantization: Literal["none", "int8", "int4"] = "none"
    """Keep weights as `int8`, or as `int4` if the file has 4 bits: less memory, faster on the CPU (docs/kernels.md)."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """Number format of the KV cache alone: `fp8_e4m3` is 8 bits, on CUDA from capability 8.9 on (docs/model.md)."""
    max_model_len: int | None = Field(default=None, ge=8, json_schema_extra=_shown("the model's own, or what fits"))
    """Most tokens of one sequence, prompt and reply together. A KV cache that can't hold one is refused."""
    block_size: Annotated[int, AfterValidator(_block_size)] = 16
    """Tokens in one block of the KV cache: 8, 16, 32 or 64."""
    num_kv_blocks: int | None = Field(default=None, ge=1, json_schema_extra=_shown("from the free memory"))
    """Blocks of the KV cache. On the CPU by default a quarter of the free memory, at most 2 GiB; taken at start."""
    gpu_memory_utilization: float = Field(default=0.88, gt=0, le=1)
    """Share of the GPU's memory that weights, activations and KV cache may take together."""
    max_num_seqs: int = Field(default=128, ge=1, le=4096)
    """Most sequences that run at the same time."""
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        json_schema_extra=_shown(f"{BATCHED_TOKENS_CUDA} on CUDA, {BATCHED_TOKENS_CPU} on the CPU"),
    )
    """Most tokens that one step computes, decodes and pieces of prompts together; at least `max_num_seqs`."""
    enable_prefix_caching: bool = True
    """Keep the blocks of finished sequences, so that a prompt that begins alike is not computed again."""
    swap_space_gib: float | None = Field(
        default=None, ge=0, le=65_536, json_schema_extra=_shown("4 on CUDA, 0 on the CPU")
    )
    """GiB of CPU memory that preempted sequences are swapped to. 0 turns swapping off."""
    num_swap_blocks: int | None = Field(default=None, ge=0, json_schema_extra=_shown("from `swap_space_gib`"))
    """The same in blocks; set one of the two."""
    preemption_mode: Literal["auto", "swap", "recompute"] = "auto"
    """Where the KV cache is full: swap a sequence to CPU memory, compute it again later, or what is faster for it."""
    write_behind_mib: float = Field(default=16.0, ge=0, le=65_536)
    """MiB of likely victims that a step may copy to the swap space before they are preempted. 0 turns it off."""
    swap_step_mib: float | None = Field(
        default=None, ge=0, le=65_536, json_schema_extra=_shown("256 on CUDA, 64 on the CPU")
    )
    """Most MiB that a step begins to copy each way between KV cache and swap space. 0 is no limit."""
    scheduling_policy: Annotated[str, AfterValidator(_policy)] = DEFAULT_POLICY
    """Order of sequences: one or more of fcfs, priority, deadline and fair (tenants), the first weighing most."""
    scheduler_delay_factor: float = Field(default=0, ge=0, le=100)
    """Hold prompts back for up to that many decode steps, so that more of them share a step. 0 is never."""
    target_itl_ms: float | None = Field(default=None, gt=0, json_schema_extra=_shown("no target"))
    """Milliseconds between two tokens of a reply: no more sequences run than keep to it."""
    num_threads: int | None = Field(default=None, ge=1, le=1024, json_schema_extra=_shown("one per core"))
    """Threads that the engine computes with on the CPU."""
    overlap_scheduling: bool | None = Field(default=None, json_schema_extra=_shown("on with CUDA, off on the CPU"))
    """Decide the next step while this one is computed, so that the GPU doesn't wait for it."""
    deterministic: bool = False
    """Start only where a job's tokens can't depend on what else runs: float32 on the CPU with compiled kernels."""
    cuda_graphs: bool = True
    """On CUDA compute decodes by graphs captured at start. Off is kernel by kernel, which is for debugging."""
    engine_mode: Literal["process", "inprocess"] = "process"
    """Run the engine in a process of its own, or inside the service, which is for debugging."""
    check_invariants: Literal["off", "idle", "step"] = "off"
    """Check the scheduler's invariants: never, whenever no work is left, or after every step."""

    lease_ms: int = Field(default=30_000, ge=300, le=_HOUR_MS)
    """Milliseconds after which the jobs of a worker that fell silent go to another one."""
    heartbeat_ms: int = Field(default=5_000, ge=100, le=600_000)
    """Milliseconds between two entries in the worker registry; a worker is forgotten after three missed ones."""
    watchdog_s: float = Field(default=60.0, gt=0, le=3600)
    """Seconds that a busy engine takes no step, or the service no turn, after which its jobs go to a peer."""
    shutdown_grace_s: float = Field(default=30.0, ge=0, le=3600)
    """Seconds that running jobs get to finish when the worker is told to stop."""
    result_ttl_ms: int = Field(default=600_000, ge=1000)
    """Milliseconds that a finished reply is kept, where the job doesn't say."""
    max_result_ttl_ms: int = Field(default=_HOUR_MS, ge=1000)
    """Upper limit of the `result_ttl_ms` that a job may ask for."""
    run_ttl_ms: int = Field(default=24 * _HOUR_MS, ge=60_000)
    """Milliseconds that an unfinished reply is kept; longer than any outage, and than any finished reply."""
    max_job_bytes: int = Field(default=_MIB, ge=1024, le=256 * _MIB)
    """Largest job: the sum of all its fields, in bytes."""
    max_queue_depth: int = Field(default=0, ge=0, le=10**12)
    """Most jobs of one lane, waiting and running; beyond it the oldest end with `overloaded`. 0 is no limit."""
    on_client_gone: Literal["stop", "finish"] = "stop"
    """What becomes of a job whose reply was deleted or has expired: it stops, or runs to its end unheard."""
    lane_weights: Annotated[str, AfterValidator(_lane_weights), "number:number:number, strict"] = DEFAULT_LANE_WEIGHTS
    """Shares of the lanes high, normal, low while all have jobs. `strict`: one starves while those above have any."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535, json_schema_extra=_shown("off"))
    """Port of `/metrics`, `/healthz` and `/readyz`. 0 takes any free port."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1)
    """Address that `metrics_port` listens on; `0.0.0.0` is all of them."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log events that are written."""
    log_format: Literal["auto", "json", "console"] = "auto"
    """Log lines as JSON or for people; `auto` takes the latter on a terminal."""
    record_trace: TraceFile | None = Field(default=None, json_schema_extra=_shown("off"))
    """File that a line is appended to for each settled job, lengths and times only, for `pagemill simulate`."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Settings that are right alone and wrong together."""
        if self.redis_url is not None and self.embedded:
            raise ValueError("redis_url and embedded exclude each other: leave one of them out")
        if self.redis_url is None and not self.embedded:
            raise ValueError("embedded is off and redis_url is missing: set one of them")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}): "
                "raise the one or lower the other"
            )
        if self.max_model_len is not None and self.num_kv_blocks is not None:
            self._check_context(self.max_model_len, self.num_kv_blocks, self.block_size)
        if self.swap_space_gib is not None and self.num_swap_blocks is not None:
            raise ValueError("swap_space_gib and num_swap_blocks exclude each other: leave one of them out")
        if self.preemption_mode == "swap" and 0 in (self.swap_space_gib, self.num_swap_blocks):
            raise ValueError("preemption_mode is swap and the swap space 0: give it some, or use auto or recompute")
        if not self.result_ttl_ms <= self.max_result_ttl_ms <= self.run_ttl_ms:
            raise ValueError(
                f"result_ttl_ms ({self.result_ttl_ms}), max_result_ttl_ms ({self.max_result_ttl_ms}) and "
                f"run_ttl_ms ({self.run_ttl_ms}) must not fall in this order"
            )
        if self.run_ttl_ms <= self.lease_ms:
            raise ValueError(f"run_ttl_ms ({self.run_ttl_ms}) must be longer than lease_ms ({self.lease_ms})")
        return self

    @staticmethod
    def _check_context(max_model_len: int, num_kv_blocks: int, block_size: int) -> None:
        num_slots = num_kv_blocks * block_size
        if max_model_len > num_slots:
            raise ValueError(
                f"max_model_len ({max_model_len}) is more than the KV cache holds ({num_slots} tokens): raise "
                f"num_kv_blocks to {-(-max_model_len // block_size)} or lower max_model_len to {num_slots}"
            )

    @property
    def queues(self) -> tuple[str, ...]:
        """The names in `queue`."""
        return tuple(self.queue.split(","))

    def batched_tokens(self, device: str) -> int:
        """The token budget of a step on `device` (`cpu` or `cuda`)."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(self.max_num_seqs, BATCHED_TOKENS_CUDA if device == "cuda" else BATCHED_TOKENS_CPU)


def shown_default(name: str) -> str:
    """The default of a setting, in words, for help texts."""
    field = Settings.model_fields[name]
    if isinstance(field.json_schema_extra, dict) and "shown_default" in field.json_schema_extra:
        return str(field.json_schema_extra["shown_default"])
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    if isinstance(field.default, float):
        return f"{field.default:g}"
    return "none" if field.default is None else str(field.default)


def load_settings(flags: Mapping[str, Any] | None = None) -> Settings:
    """The settings from `flags` (by field name; text as typed is fine), the environment and the defaults.

    Raises SettingsError: one line that names each bad value where it was set and says what is accepted.
    """
    flags = flags or {}
    try:
        return Settings(**flags)
    except ValidationError as error:
        details = error.errors(include_input=False, include_url=False)
        problems = [problem_line(detail, flags) for detail in details if detail["type"] != "default_factory_not_called"]
        raise SettingsError("; ".join(problems)) from None


def misspelt_variables(environ: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """(variable, the one that was probably meant) for each `PAGEMILL_…` that is almost a setting.

    An unknown one alone is no mistake: Kubernetes adds `PAGEMILL_SERVICE_HOST` for a service named pagemill.
    """
    known = [env_name(name) for name in Settings.model_fields]
    pairs = []
    for variable in sorted(os.environ if environ is None else environ):
        if variable.startswith(ENV_PREFIX) and variable not in known:
            close = difflib.get_close_matches(variable, known, n=1, cutoff=0.92)
            pairs += [(variable, match) for match in close]
    return pairs
