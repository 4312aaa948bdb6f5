"""A pytest plugin: put ``pytest_plugins = ["zero_ext.testing.plugin"]`` into a conftest.py."""

from collections.abc import Callable, Iterator

import pytest

from zero_ext.testing.ranks import Ranks


@pytest.fixture(scope="session")
def zero_ext_ranks() -> Iterator[Callable[[int], Ranks]]:
    """``zero_ext_ranks(n)`` is a ``Ranks`` of n processes, the same ones for the whole session."""
    made: dict[int, Ranks] = {}

    def ranks(number: int) -> Ranks:
        if number not in made:
            made[number] = Ranks(number)
        return made[number]

    yield ranks
    for each in made.values():
        each.close()
