"""When the master's process looks for cycles of objects that nobody has any more."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from oobleck.master.process import short_collections

FAR_AHEAD_S = 1e6


class Loop:
    """Refers to itself, so only a collection can free it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def left_out() -> Iterator[None]:
    """What was loaded is left out of collections of other tests."""
    yield
    gc.freeze()


def test_a_collection_leaves_out_what_outlived_one_until_all_is_looked_through() -> None:
    clock = [0.0]
    with short_collections(lambda: clock[0]):
        old = Loop()
        gc.collect()
        assert gc.get_freeze_count() > 0
        young = Loop()
        old_lives, young_lives = weakref.ref(old), weakref.ref(young)
        del old, young
        gc.collect()
        assert old_lives() is not None
        assert young_lives() is None
        clock[0] = FAR_AHEAD_S
        gc.collect()
        assert old_lives() is None
    assert gc.get_freeze_count() == 0
    assert not [hook for hook in gc.callbacks if "short_collections" in repr(hook)]
