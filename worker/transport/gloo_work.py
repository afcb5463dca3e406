"""Ending the wait for a message of gloo's, which torch can do but does not offer to Python.

When a connection breaks, gloo forgets the message that is just being read or written: whoever waits
for it waits on, and keeps its tensor. In C++ the operation has an `abort` that ends the wait
(torch/csrc/distributed/c10d/ProcessGroupGloo.hpp, SendWork and RecvWork); it is called here through
its symbol. What is called is checked first: the object that pybind11 keeps must have the table of
virtual functions of one of these classes. In a torch that is made otherwise nothing is called, and
the log says so: the wait is given up then (`waiting`), and its thread and its group are there until
the operation's time-out. Must not know transports.
"""

import ctypes
import logging
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
from torch._C._distributed_c10d import Work

log = logging.getLogger(__name__)

_KINDS = ("8SendWork", "8RecvWork")
#: In front of what a table's users refer to: the offset to the top and the type's description.
_TABLE_START = 2 * ctypes.sizeof(ctypes.c_void_p)


#: Where torch has the classes.
LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


@cache
def aborts(library: Path) -> Mapping[int, Callable[[int], None]]:
    """By the address of an operation's table of virtual functions: how it is aborted.

    Nothing where `library` is not there or lacks what is called; the log says so, once.
    """
    try:
        loaded = ctypes.CDLL(str(library))
        found = {}
        for kind in _KINDS:
            name = f"N4c10d16ProcessGroupGloo{kind}"
            table = ctypes.addressof(ctypes.c_char.in_dll(loaded, f"_ZTV{name}E"))
            abort = loaded[f"_Z{name}5abortEv"]
            abort.argtypes, abort.restype = [ctypes.c_void_p], None
            found[table + _TABLE_START] = abort
    except (OSError, AttributeError, ValueError) as error:
        log.warning(
            "this torch does not let waits for gloo's messages be ended; one that a loss cuts off "
            "keeps its thread and its group until its time-out",
            extra={"torch": str(torch.__version__), "reason": error},
        )
        return {}
    return found


def _address_at(place: int) -> int:
    return ctypes.c_void_p.from_address(place).value or 0


def end_wait(work: Work) -> bool:
    """Have whoever waits for `work` be told at once that it is not done; from any thread. Only
    after the group's connections were closed, since the tensor is free then.

    False where this cannot be done: it is no message, or torch is made otherwise.
    """
    # pybind11/detail/common.h, struct instance: the address comes after Python's own head.
    if not isinstance(work, Work) or type(work).__basicsize__ <= object.__basicsize__:
        return False
    address = _address_at(id(work) + object.__basicsize__)
    abort = aborts(LIBRARY).get(_address_at(address)) if address else None
    if abort is None:
        return False
    abort(address)
    return True
