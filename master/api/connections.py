"""Connections to the master's port, and the limits on those that wait.

A connection is *proven* once a call with a certificate of this cluster was allowed on it, as long
as the certificate's holder is not revoked. If a holder has too many proven connections, the newest
are closed. All other connections *wait*: in their handshake, silent, with garbage, or with a join
token. gRPC has only one limit for all connections, so one host could take all of them, and the
memory too. So each source has a share of the waiting connections. A source with more gets no new
ones until it has had less for a while. The share is large enough for a crowd of agents behind one
address.

A connection on which a call was denied counts as many waiting ones, also for a while after its end.
After a burst of denials, one denied call per second is answered. So denied callers cost the master
a bounded amount of work. A source that has a proven agent is never refused completely: a random
part of its attempts gets through, and agents retry. Must not know who may call what.
"""

import asyncio
import ipaddress
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import unquote

from oobleck.host.ipc.port import Peer, Port, packed
from oobleck.host.system.process import open_files
from oobleck.master.clients.outbox import Budget
from oobleck.master.process import give_back

if TYPE_CHECKING:
    from oobleck.host.security.pki import Identity

log = logging.getLogger(__name__)

#: Waiting connections of one source: two thousand agents behind one address may come at once.
MOST_OF_SOURCE = 2048
#: Waiting connections of all sources; where there are more, each source's share is less.
MOST_WAITING = 4096
#: Proven connections of one holder of certificates, each of some 60 KiB: an agent has one, a run of
#: `oobleck` two at most, a dashboard 32.
MOST_OF_HOLDER = 40
#: Waiting connections that one with a denied call counts as, until `REFUSED_S` after the last
#: denial.
DENIED_COUNTS_AS = 32
#: Denials of a connection in a second, and at once: as many as there are methods.
DENIED_PER_S, DENIED_AT_ONCE = 1.0, 32.0
#: Sources that are refused at a time. Older kernels have a net.core.optmem_max of 20 KiB, for which
#: a filter of 128 IPv6 networks is too large.
MOST_REFUSED = 100
#: Time from a source's last excess until it is let in again.
REFUSED_S = 10.0
#: Time for which a source counts as having an agent after its last proven connection.
_AGENT_S = 3600.0
#: Length of the part of an IPv6 address that a host cannot choose.
_NETWORK_BYTES = 8

#: Seconds between two checks of all connections; a check of a thousand takes 2 ms. It is made
#: earlier once `_GROWTH` more files are open, or a holder has too many connections. Kernels before
#: 6.2 do not report the number of open files, so there the interval is `_BLIND_LOOK_S`.
_LOOK_S = 1.0
_BLIND_LOOK_S = 0.2
_GLANCE_S = 0.05
_GROWTH = 64
#: Seconds from a failed check to the next.
_AGAIN_S = 10.0
#: Seconds between two lines of the log about one source.
_WARN_S = 600.0


def share(waiting: Iterable[int], of_source: int, in_all: int) -> int:
    """Return how many connections one source may have waiting, given how many each source has. It
    is the highest limit that keeps all of them to `in_all` together, but at least one and at most
    `of_source`."""
    level, left = 0, in_all
    counts = sorted(waiting)
    for position, count in enumerate(counts):
        sources = len(counts) - position
        if (count - level) * sources > left:
            return min(of_source, max(1, level + left // sources))
        left -= (count - level) * sources
        level = count
    return of_source


def source_of(address: bytes) -> bytes:
    """Return an IPv4 address as it is, or the network of an IPv6 address."""
    return address if len(address) == 4 else address[:_NETWORK_BYTES]


def _address_of(peer: str) -> Peer:
    """Parse a peer as gRPC names it, such as ipv4:10.0.0.1:4242."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return packed(host.strip("[]")), int(port)


def name_of(source: bytes) -> str:
    if len(source) == 4:
        return str(ipaddress.ip_address(source))
    return f"{ipaddress.ip_address(source.ljust(16, bytes(1)))}/{8 * _NETWORK_BYTES}"


class Refusals:
    """State of the refusals: the sources that are refused for a while after they had too many
    connections. Pure: the caller passes the time."""

    def __init__(self) -> None:
        #: Time of each source's last excess, the latest at the end.
        self._over_at: dict[bytes, float] = {}

    def look(self, waiting: Mapping[bytes, int], now: float) -> frozenset[bytes]:
        """Return the sources to refuse from now on. `waiting`: number of waiting connections by
        source."""
        most = share(waiting.values(), MOST_OF_SOURCE, MOST_WAITING)
        over = sorted((count, source) for source, count in waiting.items() if count > most)
        kept = {one: at for one, at in self._over_at.items() if now < at + REFUSED_S}
        for _, source in over:
            kept.pop(source, None)
            kept[source] = now
        self._over_at = dict(list(kept.items())[-MOST_REFUSED:])
        return frozenset(self._over_at)


class Connections:
    def __init__(self, now: Callable[[], float], was_revoked: Callable[["Identity"], bool]) -> None:
        self._now = now
        self._was_revoked = was_revoked
        #: Connections on which calls were allowed, by gRPC's names for them, the oldest first. The
        #: value has the caller, or None for one of this host in the clear. Some connections may
        #: have ended.
        self._known: dict[str, tuple[Peer, Identity | None]] = {}
        #: Budget of denials of each connection, and the time of the last one, by the same names.
        self._denied: dict[str, tuple[Budget, float]] = {}
        #: Time when a source's agent was last seen to have a proven connection.
        self._agent_at: dict[bytes, float] = {}
        #: Number of each holder's connections in `_known`.
        self._of_holder: Counter[str] = Counter()
        #: Time of the last line in the log about a source, or a holder.
        self._warned_at: dict[str, float] = {}
        #: All connections at the last look.
        self._seen: frozenset[Peer] = frozenset()
        #: Sources that get no new connections now.
        self.refused: frozenset[bytes] = frozenset()

    @property
    def proven(self) -> int:
        """Number of connections that had an allowed call and were still open at the last look."""
        return len(self._known)

    def allowed(self, peer: str, identity: "Identity | None") -> None:
        """Note that a call of this peer was allowed. `peer`: as gRPC names it, such as
        ipv4:10.0.0.1:4242."""
        # Token holders are not proven: one token may make many connections before anybody joins by
        # it.
        if peer not in self._known and not (identity is not None and identity.token):
            self._known[peer] = _address_of(peer), identity
            if identity is not None:
                self._of_holder[identity.uri] += 1

    async def denied(self, peer: str) -> None:
        """Count a denied call of this peer. Returns when it may be answered."""
        now = self._now()
        budget, _ = self._denied.get(peer) or (Budget(DENIED_PER_S, DENIED_AT_ONCE), now)
        self._denied[peer] = budget, now
        await asyncio.sleep(budget.owe(1, now))

    async def watch(self, port: int) -> None:
        """Watch the connections to `port` until this is cancelled."""
        logged = ""
        while True:
            try:
                with Port(port) as listener:
                    await self._watch(listener)
            except OSError as error:
                if (reason := error.strerror or str(error)) != logged:
                    logged = reason
                    log.warning("one host may take all connections", extra={"reason": reason})
            await asyncio.sleep(_AGAIN_S)

    async def _watch(self, listener: Port) -> None:
        """Watch, and have the kernel refuse hosts with too many connections. Raises OSError where
        the kernel neither lists connections nor refuses."""
        refusals, self.refused = Refusals(), frozenset[bytes]()
        listener.refuse(self.refused)
        looked_at, were_open = self._now(), open_files()
        while True:
            await asyncio.sleep(_GLANCE_S)
            are_open = open_files()
            look_s = _LOOK_S if are_open else _BLIND_LOOK_S
            has_room = max(self._of_holder.values(), default=0) <= MOST_OF_HOLDER
            is_early = self._now() < looked_at + look_s and are_open < were_open + _GROWTH
            if is_early and has_room:
                continue
            looked_at, were_open = self._now(), are_open
            # In a thread, since many connections take a while.
            waiting = await asyncio.to_thread(self.waiting, listener)
            self._of_holder = Counter(
                identity.uri for _, identity in self._known.values() if identity is not None
            )
            before, self.refused = self.refused, refusals.look(waiting, self._now())
            if self.refused != before:
                listener.refuse(self.refused, partly=set(filter(self._has_agent, self.refused)))
                refused = {name_of(one): waiting[one] for one in self.refused - before}
                self._warn("too many connections that make no call, refused", refused)

    def waiting(self, listener: Port) -> Counter[bytes]:
        """Count the waiting connections by source, and close a holder's surplus ones. Raises
        OSError."""
        known = list(self._known.items())  # before the kernel's list, which lacks later ones
        waiting = set(listener.peers())
        if waiting != self._seen:
            # Each ended connection has freed 60 KiB, and each call 20. This takes 0.1 ms.
            give_back()
        self._seen = frozenset(waiting)
        of_holder: Counter[str] = Counter()
        surplus = set[Peer]()
        for name, (peer, identity) in known:
            if peer not in waiting or (identity is not None and self._was_revoked(identity)):
                del self._known[name]
                continue
            if identity is not None:
                of_holder[identity.uri] += 1
            if identity is None or identity.role == "agent":
                self._agent_at[source_of(peer[0])] = self._now()
            if identity is None or of_holder[identity.uri] <= MOST_OF_HOLDER:
                waiting.discard(peer)
            else:
                surplus.add(peer)
        if surplus:
            listener.close(surplus)
            surplus_of = {uri: count for uri, count in of_holder.items() if count > MOST_OF_HOLDER}
            self._warn("too many connections of one holder, the newest are closed", surplus_of)
        self._forget_agents()
        by_source = Counter(source_of(address) for address, _ in waiting)
        for name, (_, at) in list(self._denied.items()):
            if self._now() < at + REFUSED_S:
                by_source[source_of(_address_of(name)[0])] += DENIED_COUNTS_AS
            else:
                del self._denied[name]
        return by_source

    def _forget_agents(self) -> None:
        now = self._now()
        self._agent_at = {s: at for s, at in self._agent_at.items() if now < at + _AGENT_S}

    def _has_agent(self, source: bytes) -> bool:
        """Return whether an agent at the source has a proven connection, or recently had one."""
        return self._now() < self._agent_at.get(source, -math.inf) + _AGENT_S

    def _warn(self, message: str, counts: Mapping[str, int]) -> None:
        now = self._now()
        self._warned_at = {one: at for one, at in self._warned_at.items() if now < at + _WARN_S}
        for source, count in counts.items():
            if source not in self._warned_at and len(self._warned_at) < MOST_REFUSED:
                self._warned_at[source] = now
                log.warning(message, extra={"source": source, "connections": count})
