"""Print what `pensieve admin` shows: the model, the load, and the cached conversations.

The argument is the address of the socket in the daemon's data folder: unix:DATA/admin.sock.
"""

import sys

from pensieve.client.admin import Admin

with Admin(sys.argv[1]) as admin:
    info = admin.server_info()
    print(
        f"{info.model} ({info.dtype} on {info.device}), {info.state} for {info.uptime_seconds:.0f} s"
    )
    stats = admin.stats()
    print(f"{stats.turns_running} turns run, {stats.turns_queued} wait")
    for each in admin.cached(limit=3):
        print(f"{each.conversation_id}: {each.device_tokens} tokens on the device")
    print(admin.check() or "every invariant holds")
