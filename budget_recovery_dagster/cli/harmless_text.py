"""Text that others may have chosen, for a terminal."""

from rich.console import Console


def harmless(console: Console, text: str) -> str:
    """Write what others may have named so that any terminal can show it, and obeys none of it."""
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
    return shown.encode(console.encoding, "backslashreplace").decode(console.encoding)
