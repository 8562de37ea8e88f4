"""What is remembered of tenants that have to wait."""

from types import SimpleNamespace
from typing import cast

import pytest

from worker.protocol import parse_envelope
from worker.streams import admission
from worker.streams.admission import Admission
from worker.streams.keys import lot_of
from worker.streams.queue_config import parse_config
from worker.streams.scripts import Scripts

WAIT_MS = 500


class FullScripts:
    """Lets no job begin."""

    async def admit(self, *_: object, **__: object) -> tuple[str, int]:
        return "rate", WAIT_MS


async def test_tenants_that_nobody_asks_for_again_are_forgotten_when_their_waiting_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their waiting jobs were called off, so none of them is ever looked at."""
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    owner = Admission(cast(Scripts, FullScripts()), lease_ms=30_000, run_ttl_ms=60_000)
    owner.configure(parse_config({"tenant:*:rate": "1"}))
    for number in range(2000):
        clock.now_s += 0.01
        fields = {b"prompt": b"x", b"tenant": f"t{number}".encode()}
        assert await owner.admit(parse_envelope("normal", f"{number + 1}-0", fields, now_ms=5000)) is not None
    assert owner.must_wait(lot_of(b"t1999"))
    assert not owner.must_wait(lot_of(b"t0"))
    assert len(owner._blocked_until) <= (WAIT_MS / 1000 + admission.FORGET_EVERY_S) / 0.01 + 1
