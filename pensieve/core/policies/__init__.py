"""Retention policies, which compute the value of cached chunks, and queues that order chunks by value."""
