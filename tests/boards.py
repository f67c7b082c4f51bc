"""Leaderboards in the gateway's format."""

import json
from collections.abc import Mapping
from decimal import Decimal

from budget_recovery_dagster.adapters.nats import BoardKey, encode_board_key
from budget_recovery_dagster.domain import BudgetWindow, Entity, Window

LARGEST = 500


def board_key(tenant: str, budget: str, window: str) -> str:
    return encode_board_key(BoardKey(tenant, BudgetWindow(budget, Window.parse(window))))


def board(usages: Mapping[Entity, str]) -> bytes:
    """Encode the leaderboard of these usages: the 500 largest, in descending order."""
    ranked = sorted(usages.items(), key=lambda each: Decimal(each[1]), reverse=True)
    return entries(*({"entity": entity, "usage": usage} for entity, usage in ranked[:LARGEST]))


def entries(*listed: object) -> bytes:
    """Encode a leaderboard with any entries, valid or not."""
    return json.dumps({"entries": listed, "updated_at": "2026-11-29T14:00:00Z"}).encode()
