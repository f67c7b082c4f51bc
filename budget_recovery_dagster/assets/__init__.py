"""Dagster assets and their checks."""
