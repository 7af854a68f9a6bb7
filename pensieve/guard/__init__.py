"""Tokens, limits, the audit log and error texts, independent of gRPC and HTTP."""
