"""Tokens, limits, the audit log and error texts: the checks that gRPC and HTTP share."""
