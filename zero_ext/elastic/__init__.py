"""Trainings that go on, to the bit, after ranks were lost or have come."""

from zero_ext.elastic.in_place import train_in_place
from zero_ext.elastic.run import Run

__all__ = ["Run", "train_in_place"]
