"""``deepspeed.ops.lamb``: Lamb by DeepSpeed's name, to be passed as ``optimizer=``."""

from zero_ext.deepspeed.lamb import Lamb

FusedLamb = Lamb
