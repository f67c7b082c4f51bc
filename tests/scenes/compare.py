"""The differences between two recordings, by scene and document."""

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

Recording = Mapping[str, Mapping[str, Any]]
_CONTEXT = 2


def differences(before: Recording, after: Recording) -> Iterator[str]:
    """Yield the differences of two recordings line by line; nothing if they are equal."""
    for scene in _names(before, after):
        old, new = before.get(scene), after.get(scene)
        if old is None or new is None:
            yield f"=== {scene}: only in the {'second' if old is None else 'first'} recording"
            continue
        for document in _names(old, new):
            yield from _of_document(f"{scene} / {document}", old, new, document)


def _of_document(
    title: str, old: Mapping[str, Any], new: Mapping[str, Any], document: str
) -> Iterator[str]:
    if document not in old or document not in new:
        yield f"=== {title}: only in the {'first' if document in old else 'second'} recording"
        return
    lines = list(
        difflib.unified_diff(_lines(old[document]), _lines(new[document]), n=_CONTEXT, lineterm="")
    )
    if lines:
        yield f"=== {title}"
        yield from lines[2:]


def _names(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names of both: those of the second in its order, then those only in the first."""
    return list(after) + [name for name in before if name not in after]


def _lines(content: Any) -> list[str]:
    return json.dumps(content, indent=1, ensure_ascii=False).splitlines()
