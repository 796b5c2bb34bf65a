"""The one error of this package: a file that cannot be used; says what was wanted and found."""

from __future__ import annotations

import os

_LONGEST_PART = (
    300  # an "expected" or "found" may be a whole vocabulary; the message stays readable
)


class CheckpointError(ValueError):
    """A checkpoint, or a part of one, that cannot be used as it is."""

    @classmethod
    def mismatch(
        cls, path: str | os.PathLike[str], what: str, expected: object, found: object
    ) -> CheckpointError:
        """Builds the error for one tensor or field.

        Args:
            path: the file.
            what: the tensor, metadata key or field in it.
            expected: what would have been right, in words or as a value.
            found: what the file has.

        Returns:
            The error, to be raised by the caller.
        """
        return cls(f"{os.fspath(path)}: {what}: expected {_short(expected)}, found {_short(found)}")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_PART else f"{text[:_LONGEST_PART]}... ({len(text)} chars)"
