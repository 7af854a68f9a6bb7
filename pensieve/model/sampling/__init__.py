"""Sample tokens from logits.  Each row is sampled as if it were alone in the batch."""
