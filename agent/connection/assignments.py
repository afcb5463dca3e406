"""What this agent says that it runs. Pure."""

import msgspec

from oobleck.proto.types import Assignment


def newest_plan(known: Assignment | None, told: Assignment) -> Assignment | None:
    """After the master has `told` something: a master whose journal lost its end may tell of an
    older plan than the workers have."""
    if told.job_id is None:
        return None
    if known is not None and known.job_id != told.job_id:
        known = None
    if told.assign is None or (known is not None and told.generation < known.generation):
        return known
    return msgspec.structs.replace(told, job=None)
