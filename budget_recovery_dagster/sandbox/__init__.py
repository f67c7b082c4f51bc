"""Embedded servers and a simulated gateway, for budget-recovery dev and the tests."""
