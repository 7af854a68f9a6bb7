"""The gRPC services: authenticate callers, translate messages, forward calls to owners of conversations."""
