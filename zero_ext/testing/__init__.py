"""A kit for tests of code that trains on several ranks, without GPUs and without torchrun.

``Ranks`` runs a function on N gloo ranks of this machine, one of a notebook's cells as well, with
one injected fault if that is what the test is about. ``reference_gradients`` and ``assert_bits``
compare with one process. For pytest, ``zero_ext.testing.plugin`` has the fixture
``zero_ext_ranks``.
"""

from zero_ext.testing.bits import assert_bits, reference_gradients
from zero_ext.testing.faults import Fault, InjectedError
from zero_ext.testing.ranks import Failure, Ranks, RanksError

__all__ = [
    "Failure",
    "Fault",
    "InjectedError",
    "Ranks",
    "RanksError",
    "assert_bits",
    "reference_gradients",
]
