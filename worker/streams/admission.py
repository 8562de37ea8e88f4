"""Whether a job may begin now: the queue is not paused, and its tenant is within its limits."""

import time
from dataclasses import dataclass

import structlog

from worker.protocol_envelope import JobEnvelope
from worker.streams.errors import StreamsError
from worker.streams.keys import lot_of
from worker.streams.queue_config import ANY_TENANT, QueueConfig, TenantLimits
from worker.streams.scripts import Scripts

log = structlog.get_logger(__name__)

# A tenant whose jobs are all running is asked for again after so long: one may have ended at another worker.
RECHECK_MS = 250
# How often tenants whose waiting is over are forgotten, asked for or not, in seconds.
FORGET_EVERY_S = 1.0
# What a rejected job is told where nobody knows when one of its tenant's jobs ends.
RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a job may not begin: `limit` is `concurrency`, `rate`, `tokens` or `paused`. `must_end`: it doesn't wait."""

    limit: str
    retry_after_ms: int
    must_end: bool


class Admission:
    """Owner of the queue's config, of which everybody asks; and of which tenants have to wait, as far as known here."""

    def __init__(self, scripts: Scripts, *, lease_ms: int, run_ttl_ms: int) -> None:
        self._scripts = scripts
        self._lease_ms = lease_ms
        self._run_ttl_ms = run_ttl_ms
        self._blocked_until: dict[str, float] = {}
        self._forget_at_s = 0.0
        self._limits: dict[str, TenantLimits] = {}
        self.config = QueueConfig()

    def configure(self, config: QueueConfig) -> None:
        """Another config holds from now on."""
        if config == self.config:
            return
        self.config = config
        self._blocked_until.clear()
        self._limits = {lot_of(name.encode()): limits for name, limits in config.tenants.items() if name != ANY_TENANT}

    async def admit(self, envelope: JobEnvelope) -> Refusal | None:
        """None: the job may begin, and is counted. Raises StreamsError; may be called again."""
        if self.config.is_paused:
            return Refusal("paused", 0, False)
        limits = self.config.tenant(envelope.tenant)
        if not limits.is_limited:
            return None
        verdict, wait_ms = await self._scripts.admit(
            envelope.lane,
            envelope.entry_id,
            envelope.id,
            envelope.tenant,
            lease_ms=self._lease_ms,
            concurrency=limits.concurrency,
            rate=limits.rate,
            is_token_limited=limits.token_rate is not None,
            run_ttl_ms=self._run_ttl_ms,
        )
        lot = lot_of(envelope.tenant.encode())
        if verdict == "admitted":
            self._blocked_until.pop(lot, None)
            return None
        if limits.over == "wait":
            self._block(lot, (wait_ms or RECHECK_MS) / 1000)
        return Refusal(verdict, wait_ms or RETRY_MS, limits.over == "reject")

    def _block(self, lot: str, wait_s: float) -> None:
        """A tenant has to wait. Nobody asks again for one whose waiting jobs were all called off."""
        now_s = time.monotonic()
        if now_s >= self._forget_at_s:
            self._forget_at_s = now_s + FORGET_EVERY_S
            self._blocked_until = {lot: until for lot, until in self._blocked_until.items() if until > now_s}
        self._blocked_until[lot] = now_s + wait_s

    async def ended(self, envelope: JobEnvelope, num_tokens: int) -> None:
        """A job was settled: its tenant pays for its tokens, and another of its jobs may begin."""
        self._blocked_until.pop(lot_of(envelope.tenant.encode()), None)
        token_rate = self.config.tenant(envelope.tenant).token_rate
        if token_rate is None or num_tokens == 0:
            return
        try:
            await self._scripts.charge(envelope.tenant, num_tokens, token_rate)
        except StreamsError as error:
            log.warning("tenant_not_charged", tenant=envelope.tenant, num_tokens=num_tokens, error=str(error))

    def must_wait(self, lot: str) -> bool:
        """Whether this tenant's jobs would be refused now, as far as known here."""
        until = self._blocked_until.get(lot)
        if until is None:
            return False
        if time.monotonic() < until:
            return True
        del self._blocked_until[lot]
        return False

    def limits(self, lot: str) -> TenantLimits:
        """The limits of the tenant whose lot this is."""
        return self._limits.get(lot) or self.config.tenant(ANY_TENANT)
