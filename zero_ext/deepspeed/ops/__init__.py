"""``deepspeed.ops``: the optimizers that scripts make themselves."""
