"""Cellular batching (BatchMaker): requests join and leave a batch between the cells of a model.

The daemon does not import this package. docs/cells.md describes it.
"""
