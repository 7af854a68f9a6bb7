"""Keep keys and values in memory, and move pages between its tiers."""
