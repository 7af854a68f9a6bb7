"""Several hosts: replicas of the daemon on Ray Serve (extra `cluster`)."""
