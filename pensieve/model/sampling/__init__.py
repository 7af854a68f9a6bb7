"""Samples tokens from logits, for each row as if it were alone in the batch."""
