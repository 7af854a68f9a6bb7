"""Conversations and their turns: the service side, between the doors (gRPC, HTTP) and the engine."""
