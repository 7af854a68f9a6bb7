"""The memory of keys and values, and how pages move between its tiers."""
