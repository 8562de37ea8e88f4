"""The jobs that this worker holds with an open reply: by stream entry and by the engine's name for them."""

from collections.abc import Iterator

from worker.job import Job
from worker.streams.leases import EntryKey
from worker.streams.reply_writer import ReplyWriter


class JobTable:
    """Owner of the set of open jobs. A job enters when its reply is opened and leaves when it is settled or lost."""

    def __init__(self) -> None:
        self._by_entry: dict[EntryKey, Job] = {}
        self._by_writer: dict[ReplyWriter, Job] = {}
        self._in_engine: dict[str, Job] = {}

    def __len__(self) -> int:
        return len(self._by_entry)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._by_entry.values()))

    def add(self, job: Job) -> None:
        """A reply was opened."""
        self._by_entry[job.entry.key] = job
        self._by_writer[job.writer] = job

    def remove(self, job: Job) -> None:
        """The job is settled, handed over, or somebody else's."""
        if self._by_entry.get(job.entry.key) is job:  # the same entry may have been claimed, and opened, anew
            del self._by_entry[job.entry.key]
        self._by_writer.pop(job.writer, None)
        self.leave_engine(job)

    def enter_engine(self, job: Job) -> None:
        """The engine was given the job."""
        self._in_engine |= dict.fromkeys(job.seq_ids, job)

    def leave_engine(self, job: Job) -> None:
        """The engine has nothing more to say about the job."""
        for seq_id in job.seq_ids:
            self._in_engine.pop(seq_id, None)

    def by_entry(self, key: EntryKey) -> Job | None:
        """The open job of an entry."""
        return self._by_entry.get(key)

    def by_writer(self, writer: ReplyWriter) -> Job | None:
        """The open job of a reply."""
        return self._by_writer.get(writer)

    def by_seq_id(self, seq_id: str) -> Job | None:
        """The job one of whose choices the engine calls `seq_id`."""
        return self._in_engine.get(seq_id)
