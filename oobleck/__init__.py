"""The names that users import.

    import oobleck

    with oobleck.local(nodes=5) as cluster:
        job = cluster.client.submit("job.yaml")
        for record in cluster.client.metrics(job, follow=True):
            print(record.step, record.loss)

`oobleck.Client` is an operator of any cluster (docs/python.md), and `oobleck.model`, which needs
torch, is for models of their own. Nothing is loaded until it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oobleck.client import Client
    from oobleck.core.ids import JobId
    from oobleck.core.messages import StepRecord
    from oobleck.errors import (
        Denied,
        Error,
        InvalidJob,
        JobFailed,
        NotFound,
        Refused,
        Unreachable,
    )
    from oobleck.local_cluster import LocalCluster, local
    from oobleck.records import Checkpoint, JobStatus, Node

__all__ = [
    "Checkpoint",
    "Client",
    "Denied",
    "Error",
    "InvalidJob",
    "JobFailed",
    "JobId",
    "JobStatus",
    "LocalCluster",
    "Node",
    "NotFound",
    "Refused",
    "StepRecord",
    "Unreachable",
    "local",
]

#: Names by module.
_MODULES = {
    "oobleck.client": ("Client",),
    "oobleck.errors": (
        "Denied", "Error", "InvalidJob", "JobFailed", "NotFound", "Refused", "Unreachable",
    ),
    "oobleck.core.messages": ("StepRecord",),
    "oobleck.local_cluster": ("LocalCluster", "local"),
    "oobleck.core.ids": ("JobId",),
    "oobleck.records": ("Checkpoint", "JobStatus", "Node"),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'oobleck' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
