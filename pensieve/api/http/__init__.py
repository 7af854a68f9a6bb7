"""OpenAI's and Anthropic's APIs over HTTP, for unchanged clients.

    socket ──listener──> Exchange ──front: checks, authentication──> endpoint (routes) ──> daemon
    socket <──a body, a stream of events, or an error in the API's shape──┘

An endpoint parses the body with `api/openai` or `api/anthropic`, calls the same functions as gRPC's methods,
and writes the answer. Access tokens, limits and the audit log are the same as over gRPC (guard/guard.py).
"""
