"""Tasks that need no network: text from a seed or a local file, questions about it, and scores."""
