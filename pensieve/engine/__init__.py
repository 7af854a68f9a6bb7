"""The one loop: mailbox → plan → launch → collect → commit → sink.

The same `Engine` runs in the daemon, in `pensieve chat` without a daemon, in tests and under the
simulator's virtual clock; only the four ports differ.  The mailbox and the outbox are the two places
where another thread may touch it, and hold its only locks.
"""
