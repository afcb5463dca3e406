"""The process that reads NVML for an agent (`oobleck.host.gpu.nvml`), started again where it ends.

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
    """Tell each sample, until cancelled, or until it is clear that there is none to be had.
    `command`: what prints samples; none: the reader of NVML."""
    command = command or [*with_parent(READER), str(_EVERY_S)]
    while (problem := await _one(environment, tell, command)) is not None:
        tell(Sample(problem=problem))
        await asyncio.sleep(_AGAIN_S)


async def _one(
    environment: Mapping[str, str], tell: Callable[[Sample], None], command: Sequence[str]
) -> str | None:
    """One life of the process: why it is over; None: another one would say no more."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
        limit=_MOST_BYTES,
    )
    assert process.stdout is not None
    try:
        while True:
            async with asyncio.timeout(_SILENCE_S):
                line = await process.stdout.readline()
            if not line:
                return "the process that asks NVML has ended"
            sample = msgspec.json.decode(line, type=Sample)
            if sample.problem:
                reason = {"reason": sample.problem}
                logger.warning("the health of GPUs is not watched", extra=reason)
                return None
            tell(sample)
    except TimeoutError:
        return f"NVML has been silent for {_SILENCE_S:.0f} s"
    except ValueError as error:  # too long, or no sample
        return f"what NVML says is not understood: {error}"
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        # One that the driver holds does not end.
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await process.communicate()
