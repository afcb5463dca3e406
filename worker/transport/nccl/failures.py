"""Causes of NCCL's errors: a peer, this GPU, this host, or lack of memory.

torch raises one type of exception for all. Its text has NCCL's result by name, and after "Last
error:" NCCL's last warning, which may be about something else. So the result decides, and the
warning only where the result is ambiguous:

- ncclUnhandledCudaError: CUDA has failed in this process. The GPU is sick, or it has no memory
  left, or the memory of a peer could not be mapped. In that case the peer has just ended, or the
  host does not allow mapping.
- ncclSystemError: a socket, and so a peer; or a resource that this host lacks.
- All else (ncclRemoteError, ncclInternalError, a call on an aborted group): a peer.
"""

import contextlib
import re
from collections.abc import Iterator

import torch

from oobleck.worker.runtime.errors import NodeError, TransportError, Unmapped

#: The C++ source position before one of torch's messages, and its advice after it.
_DECORATION = re.compile(r"^\[[^]]*\.(?:cc|h):\d+\] |\. This is typically caused.*$")
_RESULT = re.compile(r"\b(nccl[A-Z]\w+): ")
_WARNING = re.compile(r"^Last error:\s*(\S.*?)\s*$", re.MULTILINE)
_CUDA_FAILED = ("ncclUnhandledCudaError", "unhandled cuda error")
_NO_MEMORY = re.compile(r"out of memory|CUDA \w*alloc")
#: CUDA's errors when mapping memory that another process has shared and that is gone.
_UNMAPPED = re.compile(
    r"'(?:invalid argument|invalid resource handle|mapping of buffer object failed)'|peer access"
)
#: Shortages of the host, each with its fix.
_SHORT_OF = {
    "No space left on device": "give /dev/shm more room",
    "Too many open files": "raise the limit of open files (ulimit -n)",
    "Cannot allocate memory": "raise the limit of locked memory (ulimit -l)",
}


@contextlib.contextmanager
def peers_may_fail() -> Iterator[None]:
    """Wrap a call of NCCL.

    The device's own errors are raised unchanged. NCCL's become TransportError if a peer is gone,
    Unmapped if that or the host may be the cause, torch.AcceleratorError if the GPU is sick,
    NodeError if the host lacks something, and torch.OutOfMemoryError if the GPU lacks memory.
    """
    try:
        yield
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        raise judged(error) from None


def judged(
    error: RuntimeError,
) -> TransportError | NodeError | torch.AcceleratorError | torch.OutOfMemoryError:
    """Return the error to raise in place of torch's error."""
    text = str(error)
    result, warning = _RESULT.search(text), _WARNING.search(text)
    last = warning[1] if warning else ""
    told = _DECORATION.sub("", text.partition("\n")[0])
    if result:
        told = f"NCCL: {result[1]}" + (f" ({last})" if last else "")
    if any(words in text for words in _CUDA_FAILED):
        if _NO_MEMORY.search(last):
            return torch.OutOfMemoryError(told)
        return Unmapped(told) if _UNMAPPED.search(last) else torch.AcceleratorError(told)
    if result and result[1] == "ncclSystemError":
        for lack, fix in _SHORT_OF.items():
            if lack in last:
                return NodeError(f"{told}; {fix}")
    return TransportError(told)
