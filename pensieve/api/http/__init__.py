"""The APIs that other servers have, over HTTP: what their clients send, and answers that they understand.

    socket ──listener──> Exchange ──front: who calls, from where──> endpoint (routes) ──> the daemon
    socket <──a body, or a stream of events, or an error in the API's shape──┘

An endpoint reads a body with `api/openai`, calls what gRPC's methods call, and writes. Tokens, limits and the
audit log are those of gRPC: both doors have the same guard (guard/guard.py).
"""
