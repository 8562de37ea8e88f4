"""Where settings come from, what they refuse, and in which words."""

import pytest

from ops import settings_doc
from worker.errors import StartupError
from worker.settings import Settings, load_settings, misspelt_variables, served_name
from worker.settings_words import env_name, flag_name


@pytest.fixture(autouse=True)
def no_settings_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the developer has set stays out of these tests."""
    for name in Settings.model_fields:
        monkeypatch.delenv(env_name(name), raising=False)


def test_defaults_serve_the_demo_model_from_an_embedded_server() -> None:
    settings = load_settings()
    assert (settings.model, settings.queue) == ("smollm2", "smollm2")
    assert settings.redis_url is None
    assert settings.embedded
    assert (settings.block_size, settings.max_num_seqs, settings.gpu_memory_utilization) == (16, 128, 0.88)
    assert settings.metrics_port is None


def test_a_flag_wins_over_the_environment_and_the_environment_over_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGEMILL_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("PAGEMILL_LANE_WEIGHTS", "3:2:1")
    assert load_settings().max_num_seqs == 7
    assert load_settings().lane_weights == "3:2:1"
    assert load_settings({"max_num_seqs": "9"}).max_num_seqs == 9


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_REDIS_URL", "")
    monkeypatch.setenv("PAGEMILL_METRICS_PORT", "")
    settings = load_settings()
    assert settings.redis_url is None
    assert settings.metrics_port is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_num_seqs": "0"}, "--max-num-seqs is '0': use 1 or more"),
        ({"max_num_seqs": "many"}, "--max-num-seqs is 'many': use a whole number"),
        ({"block_size": "12"}, "--block-size is '12': use one of 8, 16, 32, 64"),
        ({"device": "tpu"}, "--device is 'tpu': use one of auto, cpu, cuda"),
        ({"gpu_memory_utilization": "nan"}, "--gpu-memory-utilization is 'nan': use 1.0 or less"),
        ({"gpu_memory_utilization": "1.5"}, "--gpu-memory-utilization is '1.5': use 1.0 or less"),
        ({"queue": "a b"}, "--queue is 'a b': use 1 to 64 letters, digits, `_`, `.` or `-`"),
        (
            {"queue": "a,b c"},
            "--queue is 'a,b c': 'b c' is no name of a queue: use 1 to 64 letters, digits, `_`, `.` or `-`",
        ),
        (
            {"queue": "a,,b"},
            "--queue is 'a,,b': '' is no name of a queue: use 1 to 64 letters, digits, `_`, `.` or `-`",
        ),
        ({"queue": "b,a, b"}, "--queue is 'b,a, b': b is there more than once: name each queue once"),
        (
            {"lane_weights": "8:4"},
            "--lane-weights is '8:4': use strict, or three whole numbers from 1 to 1000 as high:normal:low, like 8:4:1",
        ),
        (
            {"lane_weights": "8:0:1"},
            "--lane-weights is '8:0:1': use strict, or three whole numbers from 1 to 1000 as high:normal:low, "
            "like 8:4:1",
        ),
        ({"metrics_port": "65536"}, "--metrics-port is '65536': use 65535 or less"),
        ({"enable_prefix_caching": "perhaps"}, "--enable-prefix-caching is 'perhaps': use on or off"),
        ({"model": ""}, "--model is '': it must not be empty"),
        ({"data_dir": ""}, "--data-dir is '': it must not be empty"),
        ({"record_trace": ""}, "--record-trace is '': it must not be empty"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_what_is_accepted(flags: dict[str, str], message: str) -> None:
    with pytest.raises(StartupError) as refusal:
        load_settings(flags)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"redis_url": "redis://h", "embedded": "true"}, "exclude each other"),
        ({"embedded": "false"}, "redis_url is missing"),
        ({"max_num_batched_tokens": "64"}, "below max_num_seqs"),
        ({"max_model_len": "2048", "num_kv_blocks": "100"}, "(1600 tokens): raise num_kv_blocks to 128 or lower"),
        ({"swap_space_gib": "1", "num_swap_blocks": "9"}, "swap_space_gib and num_swap_blocks exclude each other"),
        ({"swap_space_gib": "0", "preemption_mode": "swap"}, "preemption_mode is swap and the swap space 0"),
        ({"num_swap_blocks": "0", "preemption_mode": "swap"}, "preemption_mode is swap and the swap space 0"),
        ({"scheduling_policy": "fifo"}, "use one or more of fcfs, priority, deadline, fair with commas"),
        ({"scheduling_policy": "fair,fair"}, "--scheduling-policy is 'fair,fair': name each rule once"),
        ({"scheduler_delay_factor": "-1"}, "use 0.0 or more"),
        ({"target_itl_ms": "0"}, "use more than 0"),
        ({"result_ttl_ms": "9000000"}, "must not fall in this order"),
        ({"run_ttl_ms": "3600000", "lease_ms": "3600000"}, "must be longer than lease_ms"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(flags: dict[str, str], words: str) -> None:
    with pytest.raises(StartupError, match=r".+") as refusal:
        load_settings(flags)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_refusal_names_the_variable_where_the_value_came_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGEMILL_BLOCK_SIZE", "9")
    with pytest.raises(StartupError, match=r"^PAGEMILL_BLOCK_SIZE is '9'"):
        load_settings()


def test_every_bad_value_is_named_at_once() -> None:
    with pytest.raises(StartupError) as refusal:
        load_settings({"model": "", "device": "tpu", "lease_ms": "1"})
    assert [part.split()[0] for part in str(refusal.value).split("; ")] == ["--model", "--device", "--lease-ms"]


def test_several_queues_are_one_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().queues == ("smollm2",)
    monkeypatch.setenv("PAGEMILL_QUEUE", " b , a.1 ")
    assert (load_settings().queue, load_settings().queues) == ("b,a.1", ("b", "a.1"))
    assert load_settings({"queue": "c"}).queues == ("c",)


def test_the_password_of_the_server_shows_nowhere() -> None:
    settings = load_settings({"redis_url": "redis://user:hunter2@host:6379/0"})
    assert "hunter2" not in repr(settings) + str(settings) + str(settings.model_dump())
    assert settings.redis_url is not None
    assert settings.redis_url.get_secret_value() == "redis://user:hunter2@host:6379/0"
    with pytest.raises(StartupError) as refusal:
        load_settings({"redis_url": "http://user:hunter2@host"})
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2", "smollm2"),
        ("/models/Llama-3.1-8B/", "Llama-3.1-8B"),
        ("models/tiny model (q4).gguf", "tiny-model-q4"),
        ("/", "model"),
        ("x" * 100, "x" * 64),
    ],
)
def test_the_queue_is_named_like_the_model_and_always_fits(model: str, name: str) -> None:
    assert served_name(model) == name
    assert load_settings({"model": model}).queue == name


def test_the_step_budget_follows_the_device_and_never_falls_below_the_batch() -> None:
    settings = load_settings()
    assert (settings.batched_tokens("cpu"), settings.batched_tokens("cuda")) == (512, 6144)
    assert load_settings({"max_num_seqs": "1000"}).batched_tokens("cpu") == 1000
    assert load_settings({"max_num_batched_tokens": "256"}).batched_tokens("cuda") == 256


def test_a_misspelt_variable_is_noticed_and_foreign_ones_are_let_be() -> None:
    environ = {"PAGEMILL_MAX_NUM_SEQ": "1", "PAGEMILL_SERVICE_HOST": "10.0.0.1", "PAGEMILL_DEBUG": "1", "HOME": "/"}
    assert misspelt_variables(environ) == [("PAGEMILL_MAX_NUM_SEQ", "PAGEMILL_MAX_NUM_SEQS")]


def test_every_setting_has_a_description_and_a_row_in_the_handbook() -> None:
    """Fails when docs/settings.md is stale: `python -m ops.settings_doc` writes it anew."""
    for name, field in Settings.model_fields.items():
        assert field.description, f"{name} has no docstring"
        (row,) = [line for line in settings_doc.render().splitlines() if f" | `{env_name(name)}` | " in line]
        is_switch = Settings.model_fields[name].annotation in (bool, bool | None)
        assert row.startswith(f"| `{flag_name(name)}`" + (f", `--no-{flag_name(name)[2:]}` |" if is_switch else " |"))
    assert settings_doc.PATH.read_text(encoding="utf-8") == settings_doc.render()
