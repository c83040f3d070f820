"""One attention layer: its state, its step, its prompt, and what is counted of it."""
