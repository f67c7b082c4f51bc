"""Implementations of the ports: NATS, PostgreSQL, and in memory."""
