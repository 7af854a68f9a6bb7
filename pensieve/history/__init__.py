"""The service that has the history of several daemons, and a daemon's connection to it.

service.py      sessions of replicas, their calls, and what they must hear; gRPC's HistoryService
presence.py     who is there, and until when
connection.py   a session, seen from the daemon
"""
