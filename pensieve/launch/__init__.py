"""Turns settings into running parts, and starts the processes that they are."""
