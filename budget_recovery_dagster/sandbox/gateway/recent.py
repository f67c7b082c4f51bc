"""What was of use lately, and no more of it than there is room for."""

from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Remembers the ``size`` values that were put in last, by name."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[str, Value] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> Value | None:
        """Return what was put in under a name; None if that was long ago, or never."""
        return self._values.get(name)

    def put(self, name: str, value: Value) -> None:
        """Remember a value; the one that was put in first is forgotten where there is no room."""
        self._values.pop(name, None)
        self._values[name] = value
        if len(self._values) > self._size:
            del self._values[next(iter(self._values))]

    def forget(self, name: str) -> None:
        """Forget a name, whether or not it is known."""
        self._values.pop(name, None)
