"""From settings to running parts: what starts processes and joins rooms that must not know each other."""
