"""Gradient sums that are sent in fewer bytes than the job trains with.

Must not know how sums are made.
"""

from dataclasses import replace

from oobleck.core.job.spec import TrainingSpec
from oobleck.core.profile import LayerProfile


def with_sums(layer: LayerProfile, training: TrainingSpec) -> LayerProfile:
    """Return `layer`, profiled with full gradient sums, for the job's kind of sums. Sums in fewer
    bytes need a copy of half the bytes beside them while they are under way."""
    if training.gradient_sums == "full":
        return layer
    return replace(
        layer,
        gradient_bytes=layer.parameter_bytes // 2,
        sum_bytes=layer.sum_bytes + layer.sum_bytes // 2,
        tied_bytes=layer.tied_bytes + layer.tied_bytes // 2,
    )
