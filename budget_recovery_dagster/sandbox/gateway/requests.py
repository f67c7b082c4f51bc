"""Requests to models, the budgets that they count into, and the charges that they become.

Also the tenants of the sandbox with their budgets, and random requests of theirs.
"""

import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from budget_recovery_dagster.adapters.nats.codec import BoardKey, CounterKey, require_encodable
from budget_recovery_dagster.domain.counters import (
    BudgetDefinition,
    BudgetWindow,
    Enforcement,
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
SHOP = "team a / 東京"
"""The tenant with customers of its own, each with a budget."""
USERS: Mapping[str, tuple[str, ...]] = {
    "acme": ("user:alice@example.com", "user:bob@example.com", "service:nightly-report"),
    "globex": ("user:hanna@example.org", "user:søren@example.org"),
    SHOP: ("user:yuki@example.jp", "user:ren@example.jp", "user:mei@example.jp"),
}
# Dollars per token.
PRICES: Mapping[str, Decimal] = {
    "openai-main/gpt-4o": Decimal("0.00001"),
    "openai-main/gpt-4o-mini": Decimal("0.0000006"),
    "bedrock/anthropic.claude:0": Decimal("0.000015"),
}
VIRTUAL_ACCOUNTS = ("va:backend", "va:data science", "va:support & sales")
AGENTS = ("agent:triage", "agent:code-review", "agent:research", "agent:translate/日本語")
COST_CENTRES = ("4711", "R&D", "G&A 50%")
CUSTOMERS = tuple(f"customer:{number:04d}@shop.example" for number in range(1, 641))
_METADATA_KEYS = {"cost centres": "cost_centre", "customers": "end_user"}
_PAST_REQUESTS = 3000
_PAST_DAYS = 120


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
        self, request: Request, at: datetime
    ) -> Iterator[tuple[BudgetDefinition, CounterKey]]:
        """Return the counters that a request at ``at`` (aware) raises by its cost.

        They belong to the windows that contain ``at``, whatever the current time is.
        """
        day = at.astimezone(UTC).date()
        for definition in self._by_tenant.get(request.tenant, ()):
            try:
                entity = request.entity(definition)
            except LookupError:
                continue
            of = _window_of(definition.budget, definition.period, day)
            yield definition, CounterKey(request.tenant, of, entity)

    def definition_of(self, key: CounterKey | BoardKey) -> BudgetDefinition | None:
        """Return the definition of the budget that a key belongs to, if there is one."""
        return self._by_period.get((key.tenant, key.of.budget, key.of.window.period))


@lru_cache(maxsize=1024)
def _window_of(budget: str, period: Period, day: date) -> BudgetWindow:
    return BudgetWindow(budget, Window.containing(period, datetime.combine(day, time(), UTC)))


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
    """A request that was allowed at ``at`` (aware), with its number in its ledger."""

    ledger: str
    number: int
    at: datetime
    request: Request

    @property
    def watermark(self) -> Watermark:
        """The mark in a counter for which this charge is the last one."""
        return Watermark(self.ledger, self.number)

    def to_json(self) -> bytes:
        """Write it as a message."""
        content = {
            "ledger": self.ledger,
            "number": self.number,
            "moment": self.at.isoformat(),
            **asdict(self.request),
            "cost": format_usage(self.request.cost),
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
        return cls(charged.ledger, charged.number, _time(read.moment), request)


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


def _time(text: str) -> datetime:
    try:
        at = require_aware(datetime.fromisoformat(text)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise UnreadableChargeError("moment is not a time with a time zone") from error
    if at.year > _LAST_YEAR:
        raise UnreadableChargeError("moment is too late for the calendar")
    return at


def _definitions_of(tenant: str) -> Iterator[BudgetDefinition]:
    enforce, audit = Enforcement.ENFORCE, Enforcement.AUDIT
    ever = Period.LIFETIME
    # Each tenant spends about $1.30 per minute. The limits that every request counts into are out
    # of reach, so that traffic continues forever. One of acme's agents and one of the shop's
    # customers have exhausted their budgets in the history, and the next are about to.
    budgets = [
        ("company", Period.MONTH, "1000000", SplitBy.NOTHING, enforce),
        ("company", Period.QUARTER, "2500000", SplitBy.NOTHING, enforce),
        ("per user", Period.DAY, "25000", SplitBy.USER, enforce),
        ("per user", Period.WEEK, "100000", SplitBy.USER, enforce),
        ("per-model", Period.MONTH, "5", SplitBy.MODEL, audit),
        ("per-model", ever, "10", SplitBy.MODEL, audit),
        ("virtual accounts", Period.QUARTER, "1000000", SplitBy.VIRTUAL_ACCOUNT, enforce),
        ("agents", ever, "2.41" if tenant == "acme" else "1000000", SplitBy.AGENT, enforce),
        ("cost centres", Period.DAY, "2", SplitBy.METADATA, audit),
    ]
    if tenant == SHOP:
        budgets.append(("customers", ever, "0.25", SplitBy.METADATA, enforce))
    for name, period, limit, split_by, enforcement in budgets:
        yield BudgetDefinition(
            tenant, name, period, Decimal(limit), split_by, enforcement, _METADATA_KEYS.get(name)
        )


BUDGETS = Budgets(each for tenant in USERS for each in _definitions_of(tenant))
"""All budgets of the sandbox."""


class Traffic:
    """Random requests of the sandbox's tenants; the same seed gives the same sequence."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - traffic, not secrets

    def request(self, tenant: str | None = None) -> Request:
        """Return a request of this tenant, or of any."""
        chance = self._random
        tenant = tenant or chance.choice(list(USERS))
        model = chance.choice(list(PRICES))
        metadata = {"cost_centre": chance.choice(COST_CENTRES)}
        # Half of the shop's requests are for a customer; some customers buy much more than others.
        if tenant == SHOP and chance.random() < 0.5:
            metadata["end_user"] = CUSTOMERS[int(len(CUSTOMERS) * chance.random() ** 2)]
        return Request(
            tenant=tenant,
            user=chance.choice(USERS[tenant]),
            model=model,
            # Few enough digits that Python's decimal context never rounds them.
            cost=chance.randint(50, 4000) * PRICES[model],
            virtual_account=chance.choice(VIRTUAL_ACCOUNTS),
            agent=chance.choice([None, None, None, *AGENTS]),
            metadata=metadata,
        )

    def history(self, now: datetime) -> Iterator[tuple[datetime, Request]]:
        """Return the requests of the past months in no order, with more of them recently."""
        for _ in range(_PAST_REQUESTS):
            age = timedelta(days=_PAST_DAYS * self._random.random() ** 3)
            yield now - age, self.request()
        # Every customer has bought something once.
        for customer in CUSTOMERS:
            bought = self.request(SHOP)
            yield (
                now - timedelta(days=_PAST_DAYS),
                replace(bought, metadata={**bought.metadata, "end_user": customer}),
            )
