"""Keeps the budget usage counters of an AI gateway recoverable."""
