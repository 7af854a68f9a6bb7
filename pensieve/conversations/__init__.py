"""Conversations and their turns in the service process, between the APIs (gRPC, HTTP) and the engine."""
