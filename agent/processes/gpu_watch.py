"""Process that reads NVML for an agent (`oobleck.host.gpu.nvml`), restarted when it ends.

A sick driver may hold it for ever; the agent goes on, and says so. Must not know what samples mean.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from oobleck.host.gpu.sample import Sample
from oobleck.host.gpu.users import READER
from oobleck.host.system.process import with_parent

logger = logging.getLogger(__name__)

#: From sample to sample.
_EVERY_S = 10.0
#: Without a sample for so long the driver hangs; the first one waits for the libraries too.
_SILENCE_S = 60.0
_AGAIN_S = 30.0
_END_S = 1.0
_MOST_BYTES = 1 << 20


async def watch(
    environment: Mapping[str, str],
    tell: Callable[[Sample], None],
    command: Sequence[str] = (),
) -> None:
    """Tell each sample, and why no more come, until cancelled, or until it is clear that this host
    has none to be had. `command`: what prints samples; none: the reader of NVML."""
    command = command or [*with_parent(READER), str(_EVERY_S)]
    while True:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
                limit=_MOST_BYTES,
            )
        except OSError as error:
            tell(Sample(problem=f"the process that asks NVML does not start: {error.strerror}"))
        else:
            try:
                last = await _listen(process, tell)
            finally:
                await _end(process)
            if last.for_good:
                logger.warning("the health of GPUs is not watched", extra={"reason": last.problem})
                return
            tell(last)
            # One that the driver holds does not end; another one would be held as well.
            await process.communicate()
        await asyncio.sleep(_AGAIN_S)


async def _listen(process: asyncio.subprocess.Process, tell: Callable[[Sample], None]) -> Sample:
    """Tell each sample of GPUs; returns the one that says why no more come."""
    assert process.stdout is not None
    try:
        while True:
            async with asyncio.timeout(_SILENCE_S):
                line = await process.stdout.readline()
            if not line:
                return Sample(problem="the process that asks NVML has ended")
            sample = msgspec.json.decode(line, type=Sample)
            if sample.problem:
                return sample
            tell(sample)
    except TimeoutError:
        return Sample(problem=f"NVML has been silent for {_SILENCE_S:.0f} s")
    except ValueError as error:  # too long, or no sample
        return Sample(problem=f"what NVML says is not understood: {error}")


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            await process.communicate()
