"""On call: production, for days, in rolling bundles."""
