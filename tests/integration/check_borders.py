"""A real check with a fault injected at one border: before or after a call to a port."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from itertools import count
from typing import Any, cast

from budget_recovery_dagster.errors import DatabaseUnreachableError, StoreUnreachableError
from budget_recovery_dagster.ports import Clock, ControlPlane, OpenStore


class CrashError(BaseException):
    """The end of a process, which no error handler must catch."""


@dataclass
class Borders:
    """The borders that a check crosses, listed in order.

    At the border with the number or name ``at``, ``inject`` is called with whether the call is to
    the store (or else to the database).
    """

    at: int | str
    inject: Callable[[bool], None]
    crossed: list[str] = field(default_factory=list)
    is_dead: bool = False

    def cross(self, name: str, *, of_store: bool) -> None:
        if self.is_dead:
            raise CrashError
        self.crossed.append(name)
        if self.at in (len(self.crossed), name):
            try:
                self.inject(of_store)
            except CrashError:
                # A dead process makes no further calls.
                self.is_dead = True
                raise

    @property
    def is_reached(self) -> bool:
        return self.at in self.crossed or self.at in range(len(self.crossed) + 1)


class _Bordered:
    """A port, or an object from a port; each call to it crosses two borders."""

    def __init__(self, port: Any, name: str, borders: Borders, *, of_store: bool) -> None:
        self._port = port
        self._name = name
        self._borders = borders
        self._of_store = of_store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._port, name)
        return lambda *arguments, **named: self._call(method, name, *arguments, **named)

    def __call__(self) -> Any:
        return self._call(self._port, "()")

    def _call(self, method: Callable[..., Any], name: str, *arguments: Any, **named: Any) -> Any:
        self._cross(f"before {name}")
        result = method(*arguments, **named)
        if hasattr(result, "__enter__"):
            return self._entered(result, name)
        self._cross(f"after {name}")
        return result

    @contextmanager
    def _entered(self, context: Any, name: str) -> Iterator[Any]:
        # The context is always left: the lease of a process that really died would expire.
        with context as given:
            self._cross(f"in {name}")
            # A lease is not wrapped, because ports read its attributes.
            borders = self._borders
            yield _Bordered(given, self._name, borders, of_store=True) if self._of_store else given
            self._cross(f"at the end of {name}")
        self._cross(f"after {name}")

    def _cross(self, name: str) -> None:
        self._borders.cross(f"{name} of {self._name}", of_store=self._of_store)


def bordered(plane: ControlPlane, borders: Borders) -> ControlPlane:
    """Return the control plane with borders around each call to its parts."""
    parts = {
        part.name: _Bordered(getattr(plane, part.name), part.name, borders, of_store=False)
        for part in fields(plane)
    }
    return replace(plane, **cast(dict[str, Any], parts))


def bordered_store(open_store: OpenStore, borders: Borders) -> OpenStore:
    """Return an opener of the store with borders around each call to it."""
    return cast(OpenStore, _Bordered(open_store, "open_store", borders, of_store=True))


def each_border(inject: Callable[[bool], None], *, at_least: int) -> Iterator[Borders]:
    """Yield borders for one check after another, until a check does not reach its border.

    Every third border, or as often as the variable EVERY_BORDER says. Requires that at least
    ``at_least`` borders were passed.
    """
    for at in count(1, int(os.environ.get("EVERY_BORDER", "3"))):
        borders = Borders(at, inject)
        yield borders
        if not borders.is_reached:
            assert at > at_least
            return


def crash(_: bool) -> None:  # noqa: FBT001 - as Borders calls it
    raise CrashError


def fail(of_store: bool) -> None:  # noqa: FBT001 - as Borders calls it
    """Let a call fail, or lose its response."""
    kind = StoreUnreachableError if of_store else DatabaseUnreachableError
    raise kind("No answer.", "check what happened.")


@dataclass
class HurriedClock:
    """A clock that moves itself forward instead of waiting."""

    clock: Clock
    ahead: timedelta = timedelta(0)

    def now(self) -> datetime:
        return self.clock.now() + self.ahead

    def host_time(self) -> datetime:
        return self.clock.host_time() + self.ahead

    def wait(self, span: timedelta) -> None:
        self.ahead += max(span, timedelta(0))
