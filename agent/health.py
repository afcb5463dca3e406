"""State of the GPUs that the agent's workers use, from samples of NVML.

Must not know where the samples are from, nor when they were taken.
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from oobleck.host.gpu.health import LOOK, hindrance, troubles
from oobleck.host.gpu.sample import GpuSample, Sample, Xid

#: Longest text in the node's status.
_MOST = 1000
#: Most errors that are remembered; further ones are repetitions.
_MOST_XIDS = 64


@dataclass(slots=True)
class GpuHealth:
    #: Places of the GPUs, slot by slot in turn; none: workers compute on CPUs.
    places: Sequence[str] = ()
    #: The last samples of each of these places.
    _samples: dict[str, deque[GpuSample]] = field(default_factory=dict)
    #: All errors that the driver has reported of them since the agent began, oldest first.
    _xids: list[Xid] = field(default_factory=list)
    #: How often each was reported, by place and code.
    xid_counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    #: Driver version of the newest sample that had one.
    driver: str = ""
    #: Why the GPUs' state is unknown now; empty: it is known.
    _problem: str = ""

    def take(self, sample: Sample) -> None:
        self._problem = sample.problem
        self.driver = sample.driver or self.driver
        for board in sample.gpus:
            if board.bus in self.places:
                self._samples.setdefault(board.bus, deque(maxlen=LOOK)).append(board)
        shown = {board.bus for board in sample.gpus}
        for bus in () if sample.problem else self._samples.keys() - shown:
            # NVML may be read by another process than before, which cannot open it any more.
            self._samples[bus].append(GpuSample(bus=bus, error="NVML does not show it any more"))
        for xid in sample.xids:
            if xid.bus and xid.bus not in self.places:
                continue
            if xid not in self._xids:
                if len(self._xids) == _MOST_XIDS:
                    continue
                self._xids.append(xid)
            self.xid_counts[xid.bus, xid.code] += 1

    @property
    def watched(self) -> bool:
        """True while samples arrive."""
        return bool(self.places) and not self._problem

    def newest(self) -> Mapping[str, GpuSample]:
        """Return the newest sample of each GPU, by its place."""
        return {bus: samples[-1] for bus, samples in self._samples.items()}

    def sick_places(self) -> set[str]:
        """Return the places of the GPUs on which nothing should be trained."""
        found = troubles(self.newest().values(), self._xids)
        return {trouble.bus for trouble in found if trouble.sick}

    def told(self) -> tuple[str, str]:
        """Return the reasons against training here, and the lesser troubles; empty if there are
        none."""
        found = troubles(self.newest().values(), self._xids)
        sick = [str(trouble) for trouble in found if trouble.sick]
        rest = [str(trouble) for trouble in found if not trouble.sick]
        if self._problem:
            rest.append(f"the health of the GPUs is not known: {self._problem}")
        return _as_lines(sick), "; ".join(rest)[:_MOST]

    def hindrance(self, slot: int, own: Collection[int]) -> str:
        """Return what slows the worker of the slot; empty if nothing does. `own`: processes of this
        node's workers."""
        if not self.places:
            return ""
        samples = self._samples.get(self.places[slot % len(self.places)], ())
        return hindrance(tuple(samples), own)[:_MOST]


def _as_lines(troubles: Sequence[str]) -> str:
    """Join as many troubles as fit, each whole, since the master compares them."""
    text = "\n".join(troubles)[: _MOST + 1]
    return text if len(text) <= _MOST else text[: text.rindex("\n")]
