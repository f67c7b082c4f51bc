"""Timings of whole pieces of work on servers of their own."""
