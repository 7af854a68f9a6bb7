"""Clients that keep no state: their requests bring a whole history, and find the conversation that it is."""
