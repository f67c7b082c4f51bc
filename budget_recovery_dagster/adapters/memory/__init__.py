"""In-memory implementations of the ports, for tests of what stands on them."""
