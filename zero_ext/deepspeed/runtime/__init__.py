"""``deepspeed.runtime``, as far as scripts import from it."""

import functools

from zero_ext.deepspeed import names

__getattr__ = functools.partial(names.child, __name__)
