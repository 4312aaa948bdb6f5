"""Other libraries' training loops over sharded models. Each module here needs its library."""
