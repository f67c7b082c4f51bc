"""Use cases, written against the ports."""
