"""What quick runs leave out: combinations, never a value."""

import itertools

import pytest
from quick_choice import choose, unneeded

STAGES, DTYPES, WAYS = range(4), ("fp32", "bf16", "fp16"), ("exchange", "collective")
ALL = [
    {"stage": stage, "dtype": dtype, "way": way}
    for stage, dtype, way in itertools.product(STAGES, DTYPES, WAYS)
]


@pytest.mark.parametrize(
    ("size", "least", "most"), [(1, 4, 4), (2, 12, 14), (3, 24, 24), (9, 24, 24)]
)
def test_each_combination_of_so_many_values_is_shown(size, least, most):
    chosen = [ALL[index] for index in choose(ALL, size, "")]
    assert least <= len(chosen) <= most
    for names in itertools.combinations(ALL[0], min(size, 3)):
        assert {tuple(item[n] for n in names) for item in chosen} == {
            tuple(item[n] for n in names) for item in ALL
        }


def test_other_tests_show_other_combinations():
    pairs = [
        {(ALL[index]["stage"], ALL[index]["way"]) for index in choose(ALL, 1, f"test {k}")}
        for k in range(12)
    ]
    assert set.union(*pairs) == set(itertools.product(STAGES, WAYS))
    assert choose(ALL, 1, "test 1") == choose(ALL, 1, "test 1")


@pytest.mark.parametrize("chosen_by_hand", [([1], "a"), ([1], "b"), ([2], "a")])
@pytest.mark.parametrize("k", range(3))
def test_what_one_list_of_values_has_stays(request, chosen_by_hand, k):
    items = [
        item for item in request.session.items if item.originalname == request.node.originalname
    ]
    left = unneeded(items, 1, "")
    shown = {str(item.callspec.params["chosen_by_hand"]) for item in items if item not in left}
    assert shown == {str(item.callspec.params["chosen_by_hand"]) for item in items}
