"""Requests to models, the budgets that they count into, and the charges that they become."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from decimal import Decimal
from functools import lru_cache
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from budget_recovery_dagster.adapters.nats.codec import CounterKey, require_encodable
from budget_recovery_dagster.domain.counters import (
    BudgetDefinition,
    BudgetWindow,
    Entity,
    SplitBy,
    UnreadableUsageError,
    UnusableNameError,
    format_usage,
    parse_usage,
)
from budget_recovery_dagster.domain.windows import Period, Window, require_aware

Clock = Callable[[], datetime]
"""Returns the current time, with a time zone."""

# A ledger's id and a number that SQLite can hold; longer ones would inflate every counter.
_WATERMARK = re.compile(r"([A-Za-z0-9_-]{1,64}):([1-9][0-9]{0,17})", re.ASCII)

# A week or month of the next year could end after the last date that Python can represent.
_LAST_YEAR = 9998


def utc_clock() -> datetime:
    """Return the current time."""
    return datetime.now(UTC)


class UnreadableChargeError(ValueError):
    """A message of the stream of costs is not a charge; the text says why."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it arrives. ``cost`` is in the gateway's currency, exact, never negative.

    A real gateway gets the cost with the answer of the model; here the request carries it. An empty
    account, agent or metadata value counts as missing.

    Raises:
        UnreadableUsageError: no counter can hold the cost.
        UnusableNameError: no key can hold one of the names, at any length.
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
        for optional in (self.virtual_account, self.agent, *self.metadata, *self.metadata.values()):
            if optional:
                require_encodable(optional)

    def entity(self, definition: BudgetDefinition) -> Entity:
        """Return the spender within this budget.

        Raises:
            LookupError: the request has no value for the field that splits the budget.
        """
        name: str | None
        match definition.split_by:
            case SplitBy.NOTHING:
                return None
            case SplitBy.USER:
                name = self.user
            case SplitBy.MODEL:
                name = self.model
            case SplitBy.VIRTUAL_ACCOUNT:
                name = self.virtual_account
            case SplitBy.AGENT:
                name = self.agent
            case SplitBy.METADATA:
                name = self.metadata.get(definition.metadata_key or "")
        if not name:
            raise LookupError(f"the request has no {definition.split_by}")
        return name


class Budgets:
    """The budget definitions of all tenants."""

    def __init__(self, definitions: Iterable[BudgetDefinition]) -> None:
        self.definitions = tuple(definitions)
        self._by_tenant: defaultdict[str, list[BudgetDefinition]] = defaultdict(list)
        self._by_period: dict[tuple[str, str, Period], BudgetDefinition] = {}
        for each in self.definitions:
            self._by_tenant[each.tenant].append(each)
            self._by_period[each.tenant, each.budget, each.period] = each

    def raised_by(
        self, request: Request, moment: datetime
    ) -> Iterator[tuple[BudgetDefinition, CounterKey]]:
        """Return the counters that a request at ``moment`` (aware) raises by its cost.

        They belong to the windows that contain ``moment``, whatever the current time is.
        """
        day = moment.astimezone(UTC).date()
        for definition in self._by_tenant.get(request.tenant, ()):
            try:
                entity = request.entity(definition)
            except LookupError:
                continue
            of = BudgetWindow(definition.budget, _window(definition.period, day))
            yield definition, CounterKey(request.tenant, of, entity)

    def definition_of(self, counter: CounterKey) -> BudgetDefinition | None:
        """Return the definition of a counter's budget, if there is one."""
        return self._by_period.get((counter.tenant, counter.of.budget, counter.of.window.period))


@lru_cache(maxsize=1024)
def _window(period: Period, day: date) -> Window:
    return Window.containing(period, datetime.combine(day, time(), UTC))


@dataclass(frozen=True, slots=True)
class Watermark:
    """A charge: its ledger, and its number there, from 1."""

    ledger: str
    number: int

    def __str__(self) -> str:
        return f"{self.ledger}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read what ``str`` writes; return None for anything else."""
        match = _WATERMARK.fullmatch(text)
        return cls(match[1], int(match[2])) if match else None


@dataclass(frozen=True, slots=True)
class Applied:
    """The last charge of each ledger that a counter includes."""

    numbers: Mapping[str, int]

    def covers(self, charged: Watermark) -> bool:
        """Whether the counter includes this charge."""
        return charged.number <= self.numbers.get(charged.ledger, 0)

    def raised(self, charged: Watermark) -> "Applied":
        """Return the marks after this charge."""
        return Applied({**self.numbers, charged.ledger: charged.number})

    def __str__(self) -> str:
        return " ".join(str(Watermark(*each)) for each in self.numbers.items())

    @classmethod
    def parse(cls, text: object) -> Self:
        """Read what ``str`` writes, and ignore everything else."""
        words = text.split(" ") if isinstance(text, str) else []
        marks = filter(None, map(Watermark.parse, words))
        return cls({mark.ledger: mark.number for mark in marks})


@dataclass(frozen=True, slots=True)
class Charge:
    """A request that was allowed at ``moment`` (aware), with its number in its ledger."""

    ledger: str
    number: int
    moment: datetime
    request: Request

    @property
    def watermark(self) -> Watermark:
        """The mark in a counter for which this charge is the last one."""
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
            UnreadableChargeError: it is not a charge.
        """
        try:
            read = _ChargeMessage.model_validate_json(message)
            names = read.model_dump(exclude={"ledger", "number", "moment", "cost"})
            request = Request(cost=parse_usage(read.cost), **names)
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_input=False)[0]
            field = "".join(f"{name}: " for name in wrong["loc"][:1])
            raise UnreadableChargeError(f"{field}{wrong['msg']}") from error
        except (UnreadableUsageError, UnusableNameError) as error:
            raise UnreadableChargeError(str(error)) from error
        charged = Watermark.parse(f"{read.ledger}:{read.number}")
        if charged is None:
            raise UnreadableChargeError("ledger and number do not identify a charge")
        return cls(charged.ledger, charged.number, _moment(read.moment), request)


class _ChargeMessage(BaseModel):
    """The message of a charge; other programs may publish anything into the stream."""

    model_config = ConfigDict(strict=True)

    ledger: str
    number: int
    moment: str
    tenant: str
    user: str
    model: str
    virtual_account: str | None
    agent: str | None
    metadata: dict[str, str]
    cost: str


def _moment(text: str) -> datetime:
    try:
        moment = require_aware(datetime.fromisoformat(text)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise UnreadableChargeError("moment is not a time with a time zone") from error
    if moment.year > _LAST_YEAR:
        raise UnreadableChargeError("moment is too late for the calendar")
    return moment
