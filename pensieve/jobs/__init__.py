"""Batch jobs of a daemon: files of requests that run in the background, beside the conversations."""
