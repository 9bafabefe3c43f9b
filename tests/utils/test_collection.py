"""Garbage collection while a program starts."""

import gc
import weakref
from contextlib import suppress

from landmark.utils.collection import without_collection


class Circle:
    """An object that only a search finds unused."""

    def __init__(self):
        self.itself = self


def test_collection_is_on_again_after_an_error_and_stays_off_where_it_was_off():
    with suppress(ValueError), without_collection():
        with without_collection():
            pass
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def test_what_is_unused_is_found_after_a_second_start():
    with without_collection():
        pass
    with without_collection():
        found = weakref.ref(Circle())
    gc.collect()
    assert found() is None
