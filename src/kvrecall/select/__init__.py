"""Rules of selection that every index shares: the GQA reduction, the deterministic top-k."""
