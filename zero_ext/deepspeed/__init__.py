"""The entry for scripts of DeepSpeed."""
