"""Requests to models, and the charge that each becomes once it is let through."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Self

from budget_recovery_dagster.adapters.nats.codec import require_encodable
from budget_recovery_dagster.domain.budgets import BudgetDefinition, SplitBy
from budget_recovery_dagster.domain.counters import (
    Entity,
    UnreadableUsageError,
    UnusableNameError,
    format_usage,
    parse_usage,
)
from budget_recovery_dagster.domain.windows import require_aware

# A ledger's id and a number that SQLite can hold; what is longer would swell every counter.
_WATERMARK = re.compile(r"([A-Za-z0-9_-]{1,64}):([1-9][0-9]{0,17})", re.ASCII)

# A week or month of the year after could end beyond what Python can say.
_LAST_YEAR = 9998


class UnreadableChargeError(ValueError):
    """A message among the costs that is no charge; the text says why."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it arrives. ``cost`` is in the gateway's currency, exact, never negative.

    A real gateway learns the cost from the model's answer; here it comes along. An account, agent
    or value of the metadata that is empty is not said.

    Raises:
        UnreadableUsageError: no counter can hold the cost.
        UnusableNameError: no key can hold one of the names, however long it may be.
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
        for name in (self.tenant, self.user, self.model):
            require_encodable(name)
        for said in (self.virtual_account, self.agent, *self.metadata, *self.metadata.values()):
            if said:
                require_encodable(said)

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
    """A charge, by its ledger and its number there, of 1 or more."""

    ledger: str
    number: int

    def __str__(self) -> str:
        return f"{self.ledger}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read what ``str`` writes; None for anything else."""
        match = _WATERMARK.fullmatch(text)
        return cls(match[1], int(match[2])) if match else None


@dataclass(frozen=True, slots=True)
class Applied:
    """Up to which charge of each ledger something has been counted."""

    numbers: Mapping[str, int]

    def covers(self, charged: Watermark) -> bool:
        """Whether this charge is among those."""
        return charged.number <= self.numbers.get(charged.ledger, 0)

    def raised(self, charged: Watermark) -> "Applied":
        """Return what has been counted once this charge has."""
        return Applied({**self.numbers, charged.ledger: charged.number})

    def __str__(self) -> str:
        return " ".join(str(Watermark(*each)) for each in self.numbers.items())

    @classmethod
    def parse(cls, text: object) -> Self:
        """Read what ``str`` writes; what else it holds says nothing."""
        words = text.split(" ") if isinstance(text, str) else []
        marks = filter(None, map(Watermark.parse, words))
        return cls({mark.ledger: mark.number for mark in marks})


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
            content = json.loads(message)
        except (ValueError, RecursionError) as error:
            raise UnreadableChargeError("it is no JSON") from error
        if not isinstance(content, dict):
            raise UnreadableChargeError("it is no JSON object")
        try:
            request = Request(
                tenant=_text(content, "tenant"),
                user=_text(content, "user"),
                model=_text(content, "model"),
                cost=parse_usage(_text(content, "cost")),
                virtual_account=_text_or_none(content, "virtual_account"),
                agent=_text_or_none(content, "agent"),
                metadata=_texts(content, "metadata"),
            )
            moment = _moment(_text(content, "moment"))
        except (UnreadableUsageError, UnusableNameError) as error:
            raise UnreadableChargeError(str(error)) from error
        charged = Watermark.parse(f"{_text(content, 'ledger')}:{_number(content, 'number')}")
        if charged is None:
            raise UnreadableChargeError("ledger and number name no charge")
        return cls(charged.ledger, charged.number, moment, request)


def _text(content: Mapping[str, object], field: str) -> str:
    if not isinstance(value := content.get(field), str):
        raise UnreadableChargeError(f"{field} is no text")
    return value


def _text_or_none(content: Mapping[str, object], field: str) -> str | None:
    return None if content.get(field, "") is None else _text(content, field)


def _texts(content: Mapping[str, object], field: str) -> dict[str, str]:
    if not isinstance(values := content.get(field), dict):
        raise UnreadableChargeError(f"{field} is no object")
    if not all(isinstance(value, str) for value in values.values()):
        raise UnreadableChargeError(f"{field} holds more than texts")
    return values


def _number(content: Mapping[str, object], field: str) -> int:
    value = content.get(field)
    if not isinstance(value, int):
        raise UnreadableChargeError(f"{field} is no whole number")
    return value


def _moment(text: str) -> datetime:
    try:
        moment = require_aware(datetime.fromisoformat(text)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise UnreadableChargeError("moment is none, or without a time zone") from error
    if moment.year > _LAST_YEAR:
        raise UnreadableChargeError("moment is too late for the calendar")
    return moment
