"""Requests to models, and the charge that each becomes once it is let through."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any, Self

from budget_recovery_dagster.domain.budgets import BudgetDefinition, SplitBy
from budget_recovery_dagster.domain.counters import Entity, format_usage, parse_usage
from budget_recovery_dagster.domain.moments import require_aware


class UnreadableChargeError(ValueError):
    """A message among the costs that is no charge; the text says why."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it arrives. ``cost`` is in the gateway's currency, exact, never negative.

    A real gateway learns the cost from the model's answer; here it comes along.
    """

    tenant: str
    user: str
    model: str
    cost: Decimal
    virtual_account: str | None = None
    agent: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parse_usage(format_usage(self.cost))

    def entity(self, definition: BudgetDefinition) -> Entity:
        """Return who spends within this budget.

        Raises:
            LookupError: nobody does: the request does not say by what the budget is split.
        """
        match definition.split_by:
            case SplitBy.NOTHING:
                return None
            case SplitBy.USER:
                return self.user
            case SplitBy.MODEL:
                return self.model
            case SplitBy.VIRTUAL_ACCOUNT:
                return _said(self.virtual_account)
            case SplitBy.AGENT:
                return _said(self.agent)
            case SplitBy.METADATA:
                return _said(self.metadata.get(definition.metadata_key or ""))


def _said(name: str | None) -> str:
    if not name:
        raise LookupError("the request does not say so")
    return name


@dataclass(frozen=True, slots=True)
class Watermark:
    """Up to which charge of a ledger something has been counted."""

    ledger: str
    number: int

    def covers(self, charge: "Charge") -> bool:
        """Whether this charge is among those."""
        return self.ledger == charge.ledger and charge.number <= self.number

    def __str__(self) -> str:
        return f"{self.ledger}:{self.number}"

    @classmethod
    def parse(cls, text: object) -> Self | None:
        """Read what ``str`` writes; None for anything else."""
        if not isinstance(text, str):
            return None
        ledger, _, number = text.rpartition(":")
        if not ledger or not number.isdecimal() or not number.isascii():
            return None
        return cls(ledger, int(number))


@dataclass(frozen=True, slots=True)
class Charge:
    """A request that was let through at ``moment`` (aware), the ``number``th of its ledger."""

    ledger: str
    number: int
    moment: datetime
    request: Request

    @property
    def watermark(self) -> Watermark:
        """What a counter bears that this charge was the last to raise."""
        return Watermark(self.ledger, self.number)

    def to_json(self) -> bytes:
        """Write it as a message."""
        request = self.request
        content = {
            "ledger": self.ledger,
            "number": self.number,
            "moment": self.moment.isoformat(),
            "tenant": request.tenant,
            "user": request.user,
            "model": request.model,
            "virtual_account": request.virtual_account,
            "agent": request.agent,
            "metadata": dict(request.metadata),
            "cost": format_usage(request.cost),
        }
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, message: bytes) -> Self:
        """Read a message.

        Raises:
            UnreadableChargeError: it is none.
        """
        try:
            content: dict[str, Any] = json.loads(message)
            request = Request(
                tenant=content["tenant"],
                user=content["user"],
                model=content["model"],
                cost=parse_usage(content["cost"]),
                virtual_account=content["virtual_account"],
                agent=content["agent"],
                metadata=content["metadata"],
            )
            moment = require_aware(datetime.fromisoformat(content["moment"]))
            return cls(content["ledger"], content["number"], moment, request)
        except (ValueError, TypeError, KeyError) as error:
            raise UnreadableChargeError(f"{type(error).__name__}: {error}") from error
