"""The APIs that other servers have, over HTTP: what their clients send, and answers that they understand.

    socket ──listener──> Exchange ──front: who calls, from where──> endpoint ──> the daemon
                                                                      │
    socket <──a body, or a stream of events, or an error in the API's shape──┘

`listener` has the sockets, `exchange` one request and its answer, `front` what every request passes,
`routes` which endpoint has which path.  An endpoint reads a body with `service/openai`, calls what gRPC's
methods call, and writes.  Nothing here knows tokens, pages or the store.

What a client may do does not depend on how it comes in: tokens, limits, the audit log and the order of
checks are those of gRPC (service/grpc/auth.py).
"""
