"""ShardTensor: what ``.grad`` and optimizer states show."""
