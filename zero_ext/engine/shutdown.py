"""At exit a rank waits for the ranks that still read its stage 3 shards."""

import atexit
import sys
import weakref

from zero_ext import _C

# Handles whose shards other ranks may read until these end, too.
serving: weakref.WeakSet = weakref.WeakSet()
_EXIT_PATIENCE_S = 60.0  # without a reader


def _serve_until_all_ranks_end() -> None:
    if hasattr(sys, "last_value"):  # this rank fails: the others must see that, not wait for it
        return
    for handle in list(serving):
        handle.engine.begin_shutdown()
    _C.wait_for_shutdowns(_EXIT_PATIENCE_S)


atexit.register(_serve_until_all_ranks_end)
