"""``deepspeed.ops``: the optimizers that scripts make themselves."""

import functools

from zero_ext.deepspeed import names

__getattr__ = functools.partial(names.child, __name__)
