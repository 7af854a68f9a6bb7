"""Print a line and wait to be ended."""

import time

print("ready", flush=True)
time.sleep(600)
