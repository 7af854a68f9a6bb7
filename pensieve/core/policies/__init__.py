"""Retention policies, which value cached chunks, and the queues that order chunks by value."""
