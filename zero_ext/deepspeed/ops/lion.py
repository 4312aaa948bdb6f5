"""``deepspeed.ops.lion``: Lion by DeepSpeed's names, to be passed as ``optimizer=``."""

from zero_ext.deepspeed.optimizers import Lion

FusedLion = DeepSpeedCPULion = Lion
