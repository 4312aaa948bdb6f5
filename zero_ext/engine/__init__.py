"""The Python side of one engine: its handle, units, module hooks, options."""
