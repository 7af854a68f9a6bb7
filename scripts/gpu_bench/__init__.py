"""The GPU bench that `scripts/bench_gpu` runs, with a module for each group of sections."""
