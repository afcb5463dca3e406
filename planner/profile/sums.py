"""Times of sums of gradients, where a job has them sent in fewer bytes than it trains with.

Must not know how sums are made.
"""

from dataclasses import replace

from oobleck.core.job.spec import TrainingSpec
from oobleck.core.profile import LayerProfile


def with_sums(layer: LayerProfile, training: TrainingSpec) -> LayerProfile:
    """`layer`, whose sums are told as of numbers that are sent as they are trained. Sums in fewer
    bytes have a copy of half the bytes beside them, as long as they are under way."""
    if training.gradient_sums == "full":
        return layer
    return replace(
        layer,
        gradient_bytes=layer.parameter_bytes // 2,
        sum_bytes=layer.sum_bytes + layer.sum_bytes // 2,
        tied_bytes=layer.tied_bytes + layer.tied_bytes // 2,
    )
