"""Attention over paged keys and values, on CPUs and GPUs."""
