"""``shard`` and the methods that it gives a module."""
