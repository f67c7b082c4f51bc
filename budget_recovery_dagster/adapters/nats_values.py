"""What a counter's value says: decoded exactly, no number ever made a float."""

import json
from decimal import Decimal

from budget_recovery_dagster.domain.counters import UnreadableUsageError, ValueShape, parse_usage

_MAX_REASON = 200


def decode_value(value: bytes) -> tuple[Decimal, ValueShape]:
    """Read a counter's value: a JSON object with ``usage``, or a bare JSON number.

    Raises:
        UnreadableUsageError: it holds no usage; the message is short printable ASCII.
    """
    try:
        content = _DECODER.decode(value.decode())
    except UnicodeDecodeError as error:
        raise UnreadableUsageError("the value is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise UnreadableUsageError("the value is not JSON") from error
    except RecursionError as error:
        raise UnreadableUsageError("the value is nested too deeply") from error
    if isinstance(content, _Number):
        return _usage(content), ValueShape.BARE
    if not isinstance(content, dict):
        raise UnreadableUsageError("the value is neither an object nor a number")
    if "usage" not in content:
        raise UnreadableUsageError("the value has no field usage")
    match content["usage"]:
        case _Number() as number:
            return _usage(number), ValueShape.NUMBER
        case str() as text:
            return _usage(text), ValueShape.TEXT
        case _:
            raise UnreadableUsageError("usage is neither text nor a number")


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
