"""Sensors, one in each file."""
