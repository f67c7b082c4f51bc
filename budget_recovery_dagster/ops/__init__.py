"""Ops: the work of jobs that materialize nothing by themselves."""
