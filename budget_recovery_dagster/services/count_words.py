"""Numbers of things as people read them."""


def counted(number: int, noun: str) -> str:
    """Write a number with its noun, which takes an s where there is not just one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
