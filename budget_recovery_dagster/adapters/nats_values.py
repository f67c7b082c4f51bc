"""What a value of the bucket says: decoded exactly, no number ever made a float."""

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import TypeGuard

from budget_recovery_dagster.domain.counters import UnreadableUsageError, ValueShape, parse_usage

_MAX_REASON = 200


def decode_value(value: bytes) -> tuple[Decimal, ValueShape]:
    """Read a counter's value: a JSON object with ``usage``, or a bare JSON number.

    Raises:
        UnreadableUsageError: it holds no usage; the message is short printable ASCII.
    """
    content = decode_json(value)
    if isinstance(content, _Number):
        return _usage(content), ValueShape.BARE
    if not isinstance(content, dict):
        raise UnreadableUsageError("the value is neither an object nor a number")
    return usage_of(content)


def decode_json(value: bytes) -> object:
    """Read a value as JSON whose numbers keep their own text.

    Raises:
        UnreadableUsageError: it is none; the message is short printable ASCII.
    """
    try:
        content: object = _DECODER.decode(value.decode())
    except UnicodeDecodeError as error:
        raise UnreadableUsageError("the value is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise UnreadableUsageError("the value is not JSON") from error
    except RecursionError as error:
        raise UnreadableUsageError("the value is nested too deeply") from error
    return content


def usage_of(content: Mapping[str, object]) -> tuple[Decimal, ValueShape]:
    """Read the field ``usage`` of a JSON object: a JSON text or number.

    Raises:
        UnreadableUsageError: it holds no usage; the message is short printable ASCII.
    """
    if "usage" not in content:
        raise UnreadableUsageError("the value has no field usage")
    match content["usage"]:
        case _Number() as number:
            return _usage(number), ValueShape.NUMBER
        case str() as text:
            return _usage(text), ValueShape.TEXT
        case _:
            raise UnreadableUsageError("usage is neither text nor a number")


def is_json_text(content: object) -> TypeGuard[str]:
    """Whether a part of a JSON value is a text, and not the text of a number."""
    return isinstance(content, str) and not isinstance(content, _Number)


def shortened(reason: str) -> str:
    """Cut a reason that quotes something long."""
    return reason if len(reason) <= _MAX_REASON else f"{reason[: _MAX_REASON - 3]}..."


class _Number(str):
    """The text of a JSON number: told from a JSON text by its type, and never made a float."""

    __slots__ = ()


_DECODER = json.JSONDecoder(parse_int=_Number, parse_float=_Number, parse_constant=_Number)


def _usage(text: str) -> Decimal:
    try:
        return parse_usage(str(text))
    except UnreadableUsageError as error:
        raise UnreadableUsageError(shortened(str(error))) from error
