"""Volatile values, replaced so that two recordings of one version are the same.

Times, ids and similar values become placeholders. Each document numbers them by first appearance,
so that a difference in one document does not renumber another. Values that several documents
share, such as the snapshots of a scene, have the same name in all of them.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

_ID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b[0-9a-f]{32}\b")
_SHORT_ID = re.compile(r"(?<![\w.])[0-9a-f]{8}(?![\w.])")
_DATE = r"\d{4}-\d\d-\d\d"
_TIME = re.compile(rf"\b{_DATE}[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z\b|[+-]\d\d:?\d\d\b)?")
_HOUR = re.compile(rf"\b{_DATE}(?:T\d\dZ?|-\d\d:00)\b(?!:)")
_CLOCK = re.compile(r"\b\d\d:\d\d:\d\d(?:\.\d+)?\b")
_SPAN = re.compile(
    r"(?<![\w.])\d+(?:\.\d+)? ?(?:ms|s|min|h|seconds?|minutes?|hours?|days?)\b", re.ASCII
)
_POSITION = re.compile(r"\b(sequence|revision)((?: number| was| is| of| from| at)*) \d+\b")
_PROCESS = re.compile(r"\bpid \d+\b")
_BLANKS = re.compile(r"(?<=\S) {2,}")
_RULES = re.compile(r"[─━═-]{4,}")
# Numbers, or digits as text, under keys that end so.
_VOLATILE_NUMBER = re.compile(
    r"(?:^|_)(?:sequence|seq|revision|seconds|bytes|size|duration|age|ms)$"
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?", re.ASCII)
_CONSTANT_NUMBERS = {"interval_seconds"}
_WRITTEN_AT = datetime(2026, 11, 29, 14, tzinfo=UTC)


class Rows(list[Any]):
    """Rows of a table without a meaningful order."""


@dataclass(frozen=True)
class Known:
    """Values that the documents of a scene share.

    ``texts`` are literal texts and their replacements; ``snapshots`` are capture times, oldest
    first; ``ids`` are all ids, by which short forms are recognized.
    """

    texts: Mapping[str, str]
    snapshots: tuple[datetime, ...]
    ids: frozenset[str]


def ids_in(content: Any) -> Iterable[str]:
    """Return the ids that occur in a document."""
    return _ID.findall(json.dumps(content, default=str))


def normalized(content: Any, known: Known) -> Any:
    """Replace what is volatile in a document."""
    return _Document(known).of(content)


def replaced(content: Any, texts: Mapping[str, str]) -> Any:
    """Replace literal texts in a document without other volatile values."""
    if isinstance(content, Mapping):
        return {key: replaced(value, texts) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [replaced(value, texts) for value in content]
    if not isinstance(content, str):
        return content
    for text in sorted(texts, key=len, reverse=True):
        content = content.replace(text, texts[text])
    return content.splitlines() if "\n" in content else content


@dataclass
class _Document:
    """The placeholders of one document."""

    known: Known
    numbered: bool = True
    _numbers: dict[str, dict[str, int]] = field(default_factory=dict)

    def of(self, content: Any, key: str = "") -> Any:
        if isinstance(content, Rows):
            content = self._in_order(content)
        match content:
            case Mapping():
                # Dagster's key "value" belongs to the enclosing key.
                return {
                    self._text(str(name)): self.of(each, key if name == "value" else str(name))
                    for name, each in content.items()
                }
            case list() | tuple():
                return [self.of(each, key) for each in content]
            case bool() | None:
                return content
            case datetime():
                return self._instant(content)
            case int() | float():
                return self._number(content, key)
        return self._value(str(content), key)

    def _in_order(self, rows: Rows) -> list[Any]:
        """Sort rows by their stable values, and then by times and known ids."""
        blank = _Document(self.known, numbered=False)

        def key(row: Any) -> tuple[str, list[str], list[int], str]:
            written, numbers = _dumped(row), self._numbers.get("id", {})
            known = [numbers.get(each, len(numbers) + 1) for each in _ID.findall(written)]
            return _dumped(blank.of(row)), _times(row), known, written

        return sorted(rows, key=key)

    def _number(self, number: float, key: str) -> Any:
        if key.endswith("_id"):
            return self._place(key, str(number))
        if key == "expiry_seconds":
            # The seconds from the write of the key to the end of its window.
            return round(number / 60) * 60
        return "<number>" if _is_volatile(key) else number

    def _value(self, text: str, key: str) -> Any:
        if _NUMBER.fullmatch(text) and _is_volatile(key):
            return "<number>"
        if key == "Nats-TTL" and text != "never":
            return "<ttl>"
        if text.startswith(("{", "[")):
            try:
                return self.of(json.loads(text, parse_float=str), key)
            except ValueError:
                pass
        if "\n" in text:
            return [self._text(line) for line in text.splitlines()]
        return self._text(text)

    def _text(self, text: str) -> str:
        for literal in sorted(self.known.texts, key=len, reverse=True):
            if not _is_date(literal):
                text = text.replace(literal, self.known.texts[literal])
        text = _TIME.sub(lambda found: self._time(found[0]), text)
        text = _HOUR.sub("<hour>", text)
        text = _CLOCK.sub("<clock>", text)
        text = _ID.sub(lambda found: self._place("id", found[0]), text)
        text = _SHORT_ID.sub(lambda found: self._short(found[0]), text)
        for literal in sorted(filter(_is_date, self.known.texts), key=len, reverse=True):
            text = re.sub(
                rf"(?<![\w-]){re.escape(literal)}(?![\w-])", self.known.texts[literal], text
            )
        text = _SPAN.sub("<span>", text)
        text = _POSITION.sub(r"\1\2 <number>", text)
        text = _PROCESS.sub("pid <number>", text)
        # Column widths depend on volatile values.
        return _RULES.sub("----", _BLANKS.sub("  ", text)).rstrip()

    def _time(self, text: str) -> str:
        written = text.replace(" ", "T")
        try:
            instant = datetime.fromisoformat(written)
        except ValueError:
            return text
        if instant.tzinfo is None:
            instant = instant.replace(tzinfo=UTC)
        if "." in written:
            return self._instant(instant)
        return self._instant(instant) if self._named(instant) else "<time>"

    def _instant(self, instant: datetime) -> str:
        return self._named(instant) or self._place("time", instant.isoformat())

    def _named(self, instant: datetime) -> str | None:
        utc = instant.astimezone(UTC)
        if utc == _WRITTEN_AT:
            return "<gateway's time>"
        if (utc.hour, utc.minute, utc.second, utc.microsecond) == (0, 0, 0, 0):
            return "<midnight>"
        if (utc.minute, utc.second, utc.microsecond) == (0, 0, 0):
            return "<hour>"
        for number, at in enumerate(self.known.snapshots, start=1):
            # A time with seconds is unique, because snapshots wait for their own second.
            if utc in (at, at.replace(microsecond=0)):
                return f"<snapshot {number}>"
        return None

    def _short(self, text: str) -> str:
        for full in sorted(self.known.ids):
            if full.startswith(text):
                return self._place("id", full).replace(">", " in short>")
        return text

    def _place(self, kind: str, value: str) -> str:
        named = self.known.texts.get(value)
        if named is not None:
            return named
        if not self.numbered:
            return f"<{kind}>"
        numbers = self._numbers.setdefault(kind, {})
        return f"<{kind} {numbers.setdefault(value, len(numbers) + 1)}>"


def _is_volatile(key: str) -> bool:
    return key not in _CONSTANT_NUMBERS and _VOLATILE_NUMBER.search(key) is not None


def _is_date(literal: str) -> bool:
    return literal[:2] == "20" and literal[:4].isdecimal()


def _dumped(content: Any) -> str:
    return json.dumps(content, sort_keys=True, default=str)


def _times(row: Any) -> list[str]:
    def instant(found: str) -> str:
        at = _parsed(found)
        return found if at is None else at.isoformat(timespec="microseconds")

    written = _dumped(row)
    return sorted(map(instant, _TIME.findall(written)))


def _parsed(text: str) -> datetime | None:
    parse: Callable[[str], datetime] = datetime.fromisoformat
    try:
        return parse(text.replace(" ", "T"))
    except ValueError:
        return None
