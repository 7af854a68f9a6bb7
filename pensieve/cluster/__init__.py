"""Run replicas of the daemon on several hosts with Ray Serve (extra `cluster`)."""
