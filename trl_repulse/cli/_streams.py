"""Standard streams that do not end a command."""

import io
import os
import sys
from typing import Any


class _Stream(io.FileIO):
    """A standard stream that drops what nobody reads, as after a pipe to `head`."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def keep_writing() -> None:
    """
    Makes output safe: readers may leave, the shell may have closed a stream, and letters that the locale lacks are escaped.
    Streams with which a caller has replaced Python's stay.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = _Stream(stream.fileno(), "w", closefd=False)
            whole = raw if stream.write_through else io.BufferedWriter(raw)
            options = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            setattr(sys, name, io.TextIOWrapper(whole, stream.encoding, "backslashreplace", **options))
