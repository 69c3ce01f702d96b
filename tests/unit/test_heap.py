"""What is settled is not looked at again, and what is garbage by then is freed."""

from __future__ import annotations

import gc
import weakref

import pytest

from firesteel.engine.heap import settle

pytestmark = pytest.mark.unit


class Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.me = self


def test_garbage_goes_and_the_rest_is_left_alone() -> None:
    try:
        node, lost = Node(), Node()
        seen, gone = weakref.ref(node), weakref.ref(lost)
        del lost
        gc.disable()
        settle()
        assert gone() is None and gc.get_freeze_count() > 1000
        assert not any(o is node for o in gc.get_objects()), "collections do not see it"
        del node
        gc.collect()
        assert seen() is not None, "a frozen cycle stays"
        settle()
        assert seen() is None, "until it is settled again"
    finally:
        gc.enable()
        gc.unfreeze()
