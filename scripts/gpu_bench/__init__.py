"""The GPU bench: what `scripts/bench_gpu` runs, a module for each group of sections."""
