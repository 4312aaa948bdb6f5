"""``deepspeed.runtime``, as far as scripts import from it."""
