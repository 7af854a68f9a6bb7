"""Batch jobs of a daemon: files of requests that are computed beside the conversations."""
