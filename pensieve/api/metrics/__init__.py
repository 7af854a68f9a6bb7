"""Metrics for Prometheus, collected and written as text on each scrape."""
