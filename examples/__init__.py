"""Examples that the tests run."""
