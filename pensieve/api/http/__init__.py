"""The APIs that other servers have, over HTTP: what their clients send, and answers that they understand.

    socket ──listener──> Exchange ──front: who calls, from where──> endpoint (routes) ──> the daemon
    socket <──a body, or a stream of events, or an error in the API's shape──┘

An endpoint reads a body with `api/openai`, calls what gRPC's methods call, and writes.  Tokens, limits,
the audit log and the order of checks are those of gRPC (api/grpc/auth.py).
"""
