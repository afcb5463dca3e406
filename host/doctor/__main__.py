"""Process that examines this host: `python -m oobleck.host.doctor`.

Each line of standard input is an `Asked`, each line of standard output its `Answer`; it ends with
standard input. A check that may hang runs in a thread that is abandoned after its time-out, so one
unreachable file server costs one finding. Must not know the caller.
"""

import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from oobleck.core.orders import (
    About,
    Answer,
    Asked,
    Call,
    Done,
    Finding,
    FindMarks,
    Hush,
    Listen,
    Look,
    Looked,
    Marks,
    Place,
    RemoveMarks,
    Seen,
    Unable,
)
from oobleck.host.doctor import gpus, network, places, system, way

#: Time-outs of the checks of a folder or of names, and of GPUs, whose drivers are slow.
PLACE_S, GPUS_S = 10.0, 40.0
#: Age after which leftover files of an examination may be removed.
_OLD_S = 3600.0

T = TypeVar("T")
_NO_LIMITS: Mapping[str, float] = {}

Found = tuple[tuple[Finding, ...], tuple[Seen, ...]]


class _Doctor:
    def __init__(self) -> None:
        self._listener: way.Listener | None = None
        self._secret = b""
        self._own = ""

    def answer(self, asked: Asked) -> Answer:
        """Carry out one order. Raises OSError."""
        order, about = asked.order, asked.about
        match order:
            case Look():
                return look(order, about)
            case FindMarks(folders=folders, examination=examination):
                find: dict[str, Callable[[], tuple[str, ...]]] = {
                    one: partial(places.marks_in, one, examination) for one in folders
                }
                return Marks(found=in_time(find, PLACE_S))
            case RemoveMarks(folders=folders, examination=examination):
                in_time(
                    {
                        one: partial(places.remove_marks, one, examination, _OLD_S)
                        for one in folders
                    },
                    PLACE_S,
                )
                return Done()
            case Listen(secret=secret, seconds=seconds):
                self._hush()
                self._secret, self._own = bytes.fromhex(secret), about.address
                self._listener = way.Listener(about.address, self._secret, seconds)
                return self._listener.listening()
            case Call():
                return way.measure(order, self._secret, self._own)
            case Hush():
                self._hush()
                return Done()
            case _:
                return Unable(reason="it does not know that order")

    def _hush(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def look(order: Look, about: About) -> Looked:
    wanted = (*about.places, *order.places)
    unique = {place.path: place for place in wanted}
    tasks: dict[str, Callable[[], Found]] = {
        path: partial(_at_place, place, order) for path, place in unique.items()
    }
    found_network: list[network.Network] = []

    def at_network() -> Found:
        found_network.append(network.read(about, order.peers))
        return tuple(network.conclude(found_network[0], about)), ()

    def at_system() -> Found:
        found = tuple(system.conclude(system.read(), about, gently=order.gently))
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return (*found, *gpus.locked_memory(locked, gpus.ADAPTERS)), ()

    def at_credentials() -> Found:
        from oobleck.host.doctor import certificates  # slow to load

        return tuple(certificates.look(Path(about.credentials), time.time())), ()

    if about.credentials:
        tasks["its certificate"] = at_credentials
    tasks["its names and routes"] = at_network
    tasks["its limits"] = at_system
    driver = "the driver of its GPUs"
    if gpus.is_here(about):
        tasks[driver] = partial(_at_gpus, about, order)
    results = in_time(tasks, PLACE_S, {driver: GPUS_S})
    findings = [finding for found, _ in results.values() for finding in found]
    findings += [_hangs(name) for name in tasks if name not in results]
    here = found_network[0].holding(about.address) if found_network else None
    return Looked(
        findings=tuple(findings),
        seen=tuple(one for _, seen in results.values() for one in seen),
        interface=here.name if here else "",
        mtu=here.mtu if here else 0,
    )


def _at_place(place: Place, order: Look) -> Found:
    facts = places.look(place, gently=order.gently, mark=order.mark)
    shared = place.use not in ("own", "journal")
    return tuple(places.conclude(facts)), (places.seen(facts),) if shared else ()


def _at_gpus(about: About, order: Look) -> Found:
    return tuple(gpus.look_for_agent(about, gently=order.gently)), ()


def _hangs(name: str) -> Finding:
    what = f"{name}: no answer in time, so whatever needs it hangs"
    fix = "check whether its file server or name service works (dmesg, mount), or unmount it"
    if "GPU" in name:
        fix = "check the kernel's log (dmesg | grep -i -e xid -e nvrm), and restart the host"
    return Finding(check="hangs", level="fail", what=what, fix=fix)


def in_time(
    tasks: Mapping[str, Callable[[], T]], limit_s: float, limits: Mapping[str, float] = _NO_LIMITS
) -> dict[str, T]:
    """Run each task in a thread of its own. Return the results of those that end in time without an
    OSError."""
    found: dict[str, T] = {}

    def note(name: str) -> None:
        with suppress(OSError):
            found[name] = tasks[name]()

    threads = {name: threading.Thread(target=note, args=(name,), daemon=True) for name in tasks}
    for thread in threads.values():
        thread.start()
    began = time.monotonic()
    for name, thread in threads.items():
        until = began + limits.get(name, limit_s)
        thread.join(max(0.0, until - time.monotonic()))
    return {name: found[name] for name in tasks if name in found}


def main() -> None:
    doctor = _Doctor()
    for line in sys.stdin.buffer:
        answer: Answer
        try:
            answer = doctor.answer(msgspec.json.decode(line, type=Asked))
        except OSError as error:
            answer = Unable(reason=(error.strerror or str(error)).lower())
        except ValueError as error:  # not an order of this version
            answer = Unable(reason=f"the order is not understood: {error}")
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    # Threads that hang in the kernel are abandoned.
    os._exit(0)


if __name__ == "__main__":
    main()
