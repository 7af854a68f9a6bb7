"""Benchmarks of this machine and this build. Each one checks its results before it times them."""
