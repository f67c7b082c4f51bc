"""Dagster jobs and their ops."""
