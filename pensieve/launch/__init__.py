"""Assemble daemons and engines from settings, and start their processes."""
