"""The text of a JSON object, of which single members are replaced and every other byte is kept."""

import json
from collections.abc import Mapping

# Numbers are passed over as text: no digit is lost, and none is too many.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)
_WHITESPACE = " \t\n\r"


def replace_members(
    text: str, replacements: Mapping[str, str], in_place_of_texts: Mapping[str, str]
) -> str:
    """Put JSON texts in the place of top-level members; those that are not there stay away.

    ``in_place_of_texts`` are put there only where a JSON string stands. ``text`` must be a sound
    JSON object. Of a name that occurs more than once the last one counts, as it does to readers.
    """
    spans = _members(text)
    found = [(spans[name], new) for name, new in replacements.items() if name in spans]
    for name, new in in_place_of_texts.items():
        if name in spans and text.startswith('"', spans[name][0]):
            found.append((spans[name], new))
    for (start, end), new in sorted(found, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def replace_all(text: str, replacement: str) -> str:
    """Put a JSON text in the place of a whole value; only the space around it stays."""
    bare = text.strip(_WHITESPACE)
    return text.replace(bare, replacement, 1)


def _members(text: str) -> dict[str, tuple[int, int]]:
    """Return where the values of the top-level members begin and end."""
    spans: dict[str, tuple[int, int]] = {}
    at = _skip(text, _skip(text, 0) + 1)
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        start = _skip(text, _skip(text, at) + 1)
        _, end = _DECODER.raw_decode(text, start)
        spans[name] = start, end
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return spans


def _skip(text: str, at: int) -> int:
    """Return where the white space that begins at a place ends."""
    while text[at] in _WHITESPACE:
        at += 1
    return at
