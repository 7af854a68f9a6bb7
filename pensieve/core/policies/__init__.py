"""Retention policies, which say what a cached chunk is worth, and the queues that ask them."""
