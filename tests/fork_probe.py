"""Print the state in which a process starts, as JSON. test_fork_server.py compares two such states."""

import json
import os
import resource
import signal
import sys

sys.stderr.write("to standard error\n")
print(
    json.dumps(
        {
            "arguments": sys.argv[1:],
            "name": __name__,
            "folder": os.getcwd(),
            "first_place": sys.path[0],
            "variables": {k: v for k, v in os.environ.items() if k.startswith("PROBE")},
            "descriptors": [fd for fd in range(64) if os.path.exists(f"/proc/self/fd/{fd}")],
            "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
            "cores": sorted(os.sched_getaffinity(0)),
            "group_of": os.getpgid(0) == os.getpgid(int(sys.argv[1])),
            "own_session": os.getsid(0) == os.getpid(),
            "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
            "unbuffered": getattr(sys.stdout, "write_through", None),
            "given": sys.stdin.read(),
        }
    )
)
sys.exit(int(sys.argv[2]))
