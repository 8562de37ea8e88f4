"""Metrics as Prometheus reads them, and the three paths that serve them."""

import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from scheduler.output import SchedulerStats, SequenceStats
from worker.errors import StartupError
from worker.http_status import Health, StatusServer
from worker.metrics import WorkerMetrics

STATS = SchedulerStats(
    num_running=3,
    num_waiting=2,
    num_swapped=0,
    num_blocks=100,
    num_free_blocks=50,
    num_cached_blocks=10,
    num_filled_slots=600,
    num_allocated_slots=640,
    num_preemptions_recompute=4,
    num_preemptions_swap=0,
    num_recomputed_tokens=77,
    prefix_queried_tokens=1000,
    prefix_hit_tokens=250,
)


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics(worker_id="w1", queues=["q", "other"], model="smollm2", version="0.1.0")


def samples(text: str) -> dict[str, float]:
    """Every sample of a metrics page by its name and labels, as the official parser reads it."""
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def page(metrics: WorkerMetrics) -> dict[str, float]:
    return samples(generate_latest(metrics.registry).decode())


def test_a_snapshot_shows_as_gauges_and_totals(metrics: WorkerMetrics) -> None:
    metrics.observe_scheduler(STATS, num_steps=9)
    read = page(metrics)
    assert read["pagemill_sequences_running"] == 3
    assert read["pagemill_sequences_waiting"] == 2
    assert [read[f"pagemill_kv_blocks,state={state}"] for state in ("used", "cached", "free")] == [40, 10, 50]
    assert read["pagemill_kv_usage_ratio"] == 0.4
    assert read["pagemill_kv_fill_ratio"] == 600 / 640
    assert read["pagemill_preemptions_total,mode=recompute"] == 4
    assert read["pagemill_recomputed_tokens_total"] == 77
    assert read["pagemill_steps_total"] == 9
    assert read["pagemill_prefix_hit_tokens_total"] == 250


def test_totals_grow_by_what_is_new_and_survive_a_new_engine(metrics: WorkerMetrics) -> None:
    metrics.observe_scheduler(STATS, num_steps=9)
    metrics.observe_scheduler(replace(STATS, num_preemptions_recompute=6), num_steps=12)
    assert page(metrics)["pagemill_preemptions_total,mode=recompute"] == 6
    metrics.engine_restarted()
    metrics.observe_scheduler(replace(STATS, num_preemptions_recompute=7), num_steps=20)
    read = page(metrics)
    assert read["pagemill_preemptions_total,mode=recompute"] == 13
    assert read["pagemill_steps_total"] == 32
    assert read["pagemill_engine_restarts_total"] == 1


def test_a_total_that_went_down_counts_whole(metrics: WorkerMetrics) -> None:
    metrics.observe_scheduler(STATS, num_steps=9)
    metrics.observe_scheduler(STATS, num_steps=2)
    assert page(metrics)["pagemill_steps_total"] == 11


def test_an_engine_without_blocks_divides_by_nothing(metrics: WorkerMetrics) -> None:
    empty = replace(
        STATS, num_blocks=0, num_free_blocks=0, num_cached_blocks=0, num_filled_slots=0, num_allocated_slots=0
    )
    metrics.observe_scheduler(empty, num_steps=0)
    read = page(metrics)
    assert (read["pagemill_kv_usage_ratio"], read["pagemill_kv_fill_ratio"]) == (0, 0)


def test_jobs_are_counted_by_outcome_with_their_tokens_and_times(metrics: WorkerMetrics) -> None:
    stats = SequenceStats(
        num_prompt_tokens=30,
        num_generated_tokens=12,
        num_cached_tokens=16,
        num_preemptions=0,
        num_recomputed_tokens=0,
        swapped_bytes=0,
        arrival_s=0.0,
        first_scheduled_s=0.1,
        first_token_s=0.2,
        finished_s=1.0,
    )
    jobs = metrics.of_queue("q")
    jobs.job_settled("done", 1.0, stats)
    jobs.job_settled("bad_request", 0.01)
    jobs.job_settled("abandoned")
    jobs.set_jobs_held(5)
    jobs.not_begun("duplicate")
    jobs.not_begun("rate")
    jobs.first_scheduled(0.1)
    jobs.first_token(-0.5)
    jobs.inter_token(0.03)
    read = page(metrics)
    outcomes, kinds = ("done", "bad_request", "abandoned"), ("prompt", "generated", "cached")
    assert [read[f"pagemill_jobs_total,outcome={name},queue=q"] for name in outcomes] == [1, 1, 1]
    assert [read[f"pagemill_tokens_total,kind={kind},queue=q"] for kind in kinds] == [30, 12, 16]
    assert read["pagemill_jobs_held,queue=q"] == 5
    not_begun = {
        why: read[f"pagemill_entries_not_begun_total,queue=q,why={why}"] for why in ("duplicate", "conflict", "rate")
    }
    assert not_begun == {"duplicate": 1, "conflict": 0, "rate": 1}
    assert read["pagemill_job_seconds_count,queue=q"] == 2
    assert read["pagemill_first_token_seconds_count,queue=q"] == 1
    assert read["pagemill_first_token_seconds_sum,queue=q"] == 0
    assert read["pagemill_inter_token_seconds_bucket,le=0.04,queue=q"] == 1
    assert read["pagemill_queue_seconds_bucket,le=0.05,queue=q"] == 0


def test_each_queue_has_series_of_its_own(metrics: WorkerMetrics) -> None:
    metrics.of_queue("q").job_settled("done", 1.0)
    metrics.of_queue("other").set_jobs_held(3)
    read = page(metrics)
    assert [read[f"pagemill_jobs_total,outcome=done,queue={queue}"] for queue in ("q", "other")] == [1, 0]
    assert [read[f"pagemill_jobs_held,queue={queue}"] for queue in ("q", "other")] == [0, 3]
    assert [read[f"pagemill_job_seconds_count,queue={queue}"] for queue in ("q", "other")] == [1, 0]


def test_swapping_shows_in_both_ways_and_what_went_wrong(metrics: WorkerMetrics) -> None:
    swapping = replace(
        STATS,
        num_swapped=2,
        num_preemptions_swap=5,
        num_full_tier_recomputes=1,
        swapped_out_bytes=4000,
        swapped_in_bytes=3000,
        num_damaged_blocks=2,
        num_cpu_blocks=20,
        num_used_cpu_blocks=7,
        written_behind_bytes=900,
        num_step_splits=3,
        prefix_tier_hit_tokens=48,
    )
    metrics.observe_scheduler(swapping, num_steps=1)
    read = page(metrics)
    assert read["pagemill_sequences_swapped"] == 2
    assert [read[f"pagemill_preemptions_total,mode={mode}"] for mode in ("swap", "recompute")] == [5, 4]
    assert read["pagemill_preemptions_swap_full_total"] == 1
    assert [read[f"pagemill_swapped_bytes_total,way={way}"] for way in ("out", "in")] == [4000, 3000]
    assert [read[f"pagemill_swap_blocks,state={state}"] for state in ("used", "free")] == [7, 13]
    assert read["pagemill_swap_damaged_blocks_total"] == 2
    assert read["pagemill_written_behind_bytes_total"] == 900
    assert read["pagemill_step_splits_total"] == 3
    assert read["pagemill_prefix_cpu_hit_tokens_total"] == 48


def test_series_are_there_before_anything_happens(metrics: WorkerMetrics) -> None:
    read = page(metrics)
    assert read["pagemill_preemptions_total,mode=swap"] == 0
    assert read["pagemill_swapped_bytes_total,way=out"] == read["pagemill_swap_damaged_blocks_total"] == 0
    assert read["pagemill_jobs_total,outcome=done,queue=q"] == 0
    assert read["pagemill_worker_info,model=smollm2,queue=q,other,version=0.1.0,worker_id=w1"] == 1


def test_two_workers_in_one_process_dont_mix(metrics: WorkerMetrics) -> None:
    other = WorkerMetrics(worker_id="w2", queues=["q"], model="smollm2", version="0.1.0")
    metrics.of_queue("q").job_settled("done")
    assert page(other)["pagemill_jobs_total,outcome=done,queue=q"] == 0


class Checks:
    """Health that a test turns on and off."""

    alive = Health(True)
    ready = Health(False, "loading the model", {"stage": "weights"})


@pytest.fixture
def server(metrics: WorkerMetrics) -> Iterator[StatusServer]:
    server = StatusServer("127.0.0.1", 0, metrics.registry, lambda: Checks.alive, lambda: Checks.ready)
    yield server
    server.close()


def get(server: StatusServer, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_metrics_are_served_as_text_that_the_parser_reads(server: StatusServer, metrics: WorkerMetrics) -> None:
    metrics.observe_scheduler(STATS, num_steps=1)
    status, body = get(server, "/metrics")
    assert status == 200
    assert samples(body.decode())["pagemill_sequences_running"] == 3


def test_health_and_readiness_answer_with_the_reason(server: StatusServer) -> None:
    status, body = get(server, "/healthz")
    assert (status, json.loads(body)) == (200, {"ok": True, "reason": "ok"})
    status, body = get(server, "/readyz")
    assert (status, json.loads(body)) == (503, {"ok": False, "reason": "loading the model", "stage": "weights"})


def test_other_paths_and_methods_are_refused(server: StatusServer) -> None:
    assert get(server, "/")[0] == 404
    assert get(server, "/metrics", "POST")[0] == 405


def test_a_stalled_client_doesnt_hold_up_the_others(server: StatusServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as stalled:
        stalled.sendall(b"GET /healthz HTTP/1.1\r\n")
        assert get(server, "/healthz")[0] == 200


def test_a_port_that_is_taken_is_one_clear_line(server: StatusServer, metrics: WorkerMetrics) -> None:
    with pytest.raises(StartupError) as refusal:
        StatusServer("127.0.0.1", server.port, metrics.registry, lambda: Checks.alive, lambda: Checks.ready)
    assert str(refusal.value).startswith(f"can't listen on 127.0.0.1:{server.port} for metrics (")
    assert "--metrics-port" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_host_that_doesnt_resolve_is_one_clear_line(metrics: WorkerMetrics) -> None:
    with pytest.raises(StartupError, match="can't listen on no such host:0 for metrics"):
        StatusServer("no such host", 0, metrics.registry, lambda: Checks.alive, lambda: Checks.ready)


def test_the_port_is_free_again_after_close(metrics: WorkerMetrics) -> None:
    server = StatusServer("127.0.0.1", 0, metrics.registry, lambda: Checks.alive, lambda: Checks.ready)
    server.close()
    again = StatusServer("127.0.0.1", server.port, metrics.registry, lambda: Checks.alive, lambda: Checks.ready)
    assert get(again, "/healthz")[0] == 200
    again.close()
