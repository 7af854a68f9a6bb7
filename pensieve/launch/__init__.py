"""Turns settings into running parts, and starts the processes that run them."""
