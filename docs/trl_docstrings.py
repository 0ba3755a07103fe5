"""Griffe extension: TRL-style docstrings as the Markdown that the API pages show.

TRL's sections (`Args:`, `Returns:`, ...) look like Google's, but their types are Markdown, several names can share an
entry, and fields are grouped under `> Parameters that control ...`. Google's parser would show the backticks and drop
the rest. Here every section becomes a bold heading over a list. References such as [`~trl.RLOOConfig`] become code.
"""

import re
import textwrap

import griffe


_LISTS = ("Args", "Parameters", "Attributes", "Raises")
_TEXTS = ("Returns", "Yields", "Example", "Examples")
_HEADING = re.compile(rf"^({'|'.join(_LISTS + _TEXTS)}):$")
_REFERENCE = re.compile(r"\[`~?([^`\]]+)`\](?!\()")
_ALERT = re.compile(r"^> \[!(\w+)\]\n((?:^>.*\n?)+)", re.MULTILINE)


def to_markdown(docstring: str) -> str:
    """Rewrites a cleaned TRL-style docstring as Markdown."""
    parts: list[str] = []
    lines = docstring.splitlines()
    while lines:
        line = lines.pop(0)
        heading = _HEADING.match(line)
        if heading is None:
            parts.append(line)
            continue
        block = []
        while lines and (not lines[0] or lines[0].startswith(" ")):
            block.append(lines.pop(0))
        text = textwrap.dedent("\n".join(block)).strip("\n")
        parts += ["", f"**{heading[1]}**", "", _as_list(text) if heading[1] in _LISTS else text, ""]
    text = _ALERT.sub(_as_admonition, "\n".join(parts))
    return _REFERENCE.sub(r"`\1`", text)


def _as_list(text: str) -> str:
    """One list item for each entry; a line quoted with `>` becomes a heading over those that follow."""
    items: list[str] = []
    entry = ""
    for line in text.splitlines():
        if not line or line.startswith(" "):
            items.append(line)
        elif line.startswith("> ") and not line.startswith("> ["):
            items += ["", f"*{line[2:]}*", ""]
        else:
            entry = f"{entry} {line}" if entry else line
            if ":" in entry:  # else a list of names that goes on in the next line
                names, rest = re.match(r"([^:(]+?)(?= \(|:)(.*)", entry, re.DOTALL).groups()
                bold = ", ".join(f"**{name.strip()}**" for name in names.split(","))
                items.append(f"- {bold}{rest}")
                entry = ""
    return "\n".join(items)


def _as_admonition(match: re.Match) -> str:
    body = re.sub(r"^> ?", "    ", match[2], flags=re.MULTILINE)
    return f"!!! {match[1].lower()}\n{body}"


class TRLDocstrings(griffe.Extension):
    """Applies [`to_markdown`] to every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
