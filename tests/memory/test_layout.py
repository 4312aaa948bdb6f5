"""Layout: whatever the sizes, slots lie apart and ranges cut them without loss."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zero_ext import _C

ODD_SIZES = [0, 1, 7, 13]
BLOCK, SMALLEST_IN_BLOCKS = 256, 4096
large = st.sampled_from([4095, 4096, 4097, 5000, 70000])
sizes = st.lists(st.sampled_from(ODD_SIZES) | st.integers(0, 300) | large, max_size=12)
ranges = st.integers(1, 9)
alignments = st.sampled_from([1, 16, 32])  # elements: none, 64 bytes of float32, of bfloat16


def any_layout(test):
    """Runs ``test(layout, numels, alignment)`` on drawn layouts and on the corners."""
    drawn = given(numels=sizes, ranges=ranges, alignment=alignments)
    corners = [
        example(numels=[], ranges=3, alignment=16),
        example(numels=[0], ranges=1, alignment=16),
        example(numels=ODD_SIZES, ranges=1, alignment=16),
        example(numels=ODD_SIZES, ranges=4, alignment=16),
        example(numels=[1], ranges=9, alignment=16),  # more ranks than elements
        example(numels=[0, 0, 1, 0], ranges=2, alignment=32),
        example(numels=[16] * 8, ranges=4, alignment=16),  # no padding at all
        example(numels=[1000], ranges=7, alignment=1),
        example(numels=[13, 0, 5000, 7, 70000, 0], ranges=3, alignment=16),
        example(numels=[4096, 1, 4096], ranges=40, alignment=32),  # a range is one block
    ]

    def run(numels, ranges, alignment):
        test(_C.Layout(numels, ranges=ranges, alignment=alignment), numels, alignment)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    for corner in corners:
        run = corner(run)
    return drawn(run)


def slots_of(layout):
    return [layout.slot(i) for i in range(layout.size)]


@any_layout
def test_slots_are_aligned_disjoint_in_order_and_in_bounds(layout, numels, alignment):
    slots = slots_of(layout)
    assert [slot.numel for slot in slots] == numels
    assert all(slot.offset % alignment == 0 for slot in slots)
    assert all(a.offset + a.padded_numel <= b.offset for a, b in pairwise(slots))
    assert all(slot.offset >= 0 for slot in slots)
    assert all(slot.offset + slot.padded_numel <= layout.padded_numel for slot in slots)


def has_blocks(numels):
    return any(numel >= SMALLEST_IN_BLOCKS for numel in numels)


@any_layout
def test_a_slot_is_padded_by_less_than_the_alignment_or_a_block(layout, numels, alignment):
    for i, slot in enumerate(slots_of(layout)):
        assert slot.padded_numel % alignment == 0
        following = next(filter(None, numels[i + 1 :]), 0)
        most = BLOCK if following >= SMALLEST_IN_BLOCKS and slot.numel else alignment
        assert 0 <= slot.padded_numel - slot.numel < most


@any_layout
def test_no_block_of_a_slot_lies_in_two_ranges(layout, numels, alignment):
    for i, slot in enumerate(slots_of(layout)):
        if slot.numel >= SMALLEST_IN_BLOCKS:
            assert all(piece.slot_begin % BLOCK == 0 for piece in layout.pieces(i))
            assert all(piece.range_begin % BLOCK == 0 for piece in layout.pieces(i))
        assert all(piece.numel > 0 for piece in layout.pieces(i)), "nothing but padding"


@any_layout
def test_ranges_are_equal_aligned_and_no_longer_than_needed(layout, numels, alignment):
    assert layout.padded_numel == layout.ranges * layout.range_numel
    assert layout.range_numel % alignment == 0
    assert layout.range_numel >= alignment, "a buffer or a message would be empty"
    assert [layout.range_begin(r) for r in range(layout.ranges)] == [
        r * layout.range_numel for r in range(layout.ranges)
    ]
    used = sum(slot.padded_numel for slot in slots_of(layout))
    multiple = BLOCK if has_blocks(numels) else alignment
    fewest = max(multiple, -(-used // layout.ranges))
    assert layout.range_numel < fewest + multiple


@any_layout
def test_pieces_cover_each_slot_exactly_once(layout, numels, alignment):
    for i, slot in enumerate(slots_of(layout)):
        held, gaps = [], []
        for piece in layout.pieces(i):
            begin = piece.range * layout.range_numel + piece.range_begin
            assert begin == slot.offset + piece.slot_begin
            assert 0 <= piece.range < layout.ranges and piece.range_begin >= 0
            assert piece.range_begin + piece.numel + piece.gap_numel <= layout.range_numel
            assert piece.numel + piece.gap_numel > 0
            held.extend(range(begin, begin + piece.numel))
            gaps.extend(range(begin + piece.numel, begin + piece.numel + piece.gap_numel))
        assert held == list(range(slot.offset, slot.offset + slot.numel))
        assert gaps == list(range(slot.offset + slot.numel, slot.offset + slot.padded_numel))


@any_layout
def test_a_range_has_at_most_one_piece_of_a_slot(layout, numels, alignment):
    for i in range(layout.size):
        holders = [piece.range for piece in layout.pieces(i)]
        assert holders == sorted(set(holders))


@any_layout
def test_bounds_agree_with_the_pieces(layout, numels, alignment):
    for i, numel in enumerate(numels):
        bounds = layout.bounds(i)
        assert len(bounds) == layout.ranges + 1
        assert bounds[0] == 0 and bounds[-1] == numel and bounds == sorted(bounds)
        from_pieces = dict.fromkeys(range(layout.ranges), 0)
        for piece in layout.pieces(i):
            from_pieces[piece.range] = piece.numel
            if piece.numel:
                assert bounds[piece.range] == piece.slot_begin
        assert [b - a for a, b in pairwise(bounds)] == list(from_pieces.values())


@any_layout
def test_the_place_of_a_slot_does_not_depend_on_the_number_of_ranges(layout, numels, alignment):
    alone = _C.Layout(numels, ranges=1, alignment=alignment)
    assert [s.offset for s in slots_of(layout)] == [s.offset for s in slots_of(alone)]


@pytest.mark.parametrize(
    ("numels", "ranges", "alignment", "message"),
    [
        ([1], 0, 16, "ranges and alignment must be positive"),
        ([1], 1, 0, "ranges and alignment must be positive"),
        ([1, -1], 1, 16, "negative numel"),
    ],
)
def test_impossible_layouts_are_refused(numels, ranges, alignment, message):
    with pytest.raises(ValueError, match=message):
        _C.Layout(numels, ranges=ranges, alignment=alignment)
