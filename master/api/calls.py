"""Counters of gRPC calls: how many there are, how they end, and how long they take. Must not know
what they do."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from oobleck.host.metrics.families import Durations
from oobleck.proto import control_pb2 as pb

#: By the numbers that gRPC's contexts have for them.
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


class Calls:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        #: By method: its name alone, as in GetJob.
        self.open: Counter[str] = Counter()
        #: By method and the name of the status. What an alert looks for is there from the start, as
        #: Prometheus sees no increase in what begins at 1.
        self.ended: Counter[tuple[str, str]] = Counter(
            {
                (method.name, grpc.StatusCode.INTERNAL.name): 0
                for service in pb.DESCRIPTOR.services_by_name.values()
                for method in service.methods
            }
        )
        #: Of calls that are no streams.
        self.took: dict[str, Durations] = {}

    @asynccontextmanager
    async def count(self, method: str, context: Any, *, stream: bool) -> AsyncIterator[None]:
        """Around all that is done for one call of `method`, written as /service/name."""
        name, began = method.rpartition("/")[2], self._now()
        self.open[name] += 1
        cancelled = True
        try:
            yield
            cancelled = False
        except Exception:
            cancelled = False
            raise
        finally:
            self.open[name] -= 1
            self.ended[name, "CANCELLED" if cancelled else _status(context)] += 1
            if not stream:
                self.took.setdefault(name, Durations()).add(self._now() - began)


def _status(context: Any) -> str:
    code = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else _CODES.get(code or 0, "UNKNOWN")
