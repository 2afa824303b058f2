"""What is closed at the end of a `with` statement."""

from typing import Self


class Closable:
    """Makes a class with a method `close` a context manager, which calls that in the end, whatever it returns."""

    def close(self) -> object:
        """Lets go of what is held."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
