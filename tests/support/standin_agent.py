"""The real agent, but with the stand-in warm process. Its arguments: MASTER NAME WORKERS.

GPU_SAMPLES: a file with what NVML says of the GPUs that it has then. HEALTH_LISTEN: as the flag.
"""

import asyncio
import os
import sys
from typing import NoReturn

from oobleck.agent.__main__ import serve
from oobleck.agent.config import AgentConfig
from oobleck.agent.connection.enrol import Holder
from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.messages import FaultRule
from oobleck.host import log
from oobleck.host.gpu.devices import Gpu
from support.folders import SUPPORT


def main() -> NoReturn:
    master, name, workers = sys.argv[1:]
    node = NodeName(name)
    log.configure()
    samples = os.environ.get("GPU_SAMPLES")
    places = ("0000:3b:00.0", "0000:b3:00.0") if samples else ()
    gpus = [Gpu(name="H100", uuid=place, memory_bytes=80 << 30, bus=place) for place in places]
    config = AgentConfig(
        master=master,
        name=node,
        hostname="testhost",
        worker_slots=int(workers),
        gpus=tuple(gpus),
        address=None,
        memory_per_worker_bytes=1 << 30,
        faults=(
            FaultRule(worker=WorkerId(node, 0), point="before:Forward", step=3),
            FaultRule(worker=WorkerId(node, 0), point="before:Forward", step=1000),
        ),
        warm_command=(sys.executable, str(SUPPORT / "standin_warm.py")),
        environment={**os.environ, "PYTHONPATH": str(SUPPORT.parent)},
        watch_command=("cat", samples) if samples else (),
    )
    holder = Holder(master=master, folder=None, credentials=None)
    health = os.environ.get("HEALTH_LISTEN")
    sys.exit(asyncio.run(serve(config, holder, health_listen=health)))
