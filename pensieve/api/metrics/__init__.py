"""Figures for Prometheus: counted as turns go, collected and written as text when somebody asks."""
