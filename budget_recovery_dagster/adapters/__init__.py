"""Implementations of the ports for NATS, PostgreSQL and Parquet."""
