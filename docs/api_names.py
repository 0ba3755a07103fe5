"""
Writes `docs/api/names.txt`: every public object with its parameters and their defaults, read from the source without importing it.

    python docs/api_names.py

A change of the public interface is a change of that file, which a test compares. Public is what the pages in `docs/api` render, but for
`INTERNAL`, which they render for those who work on this package.
"""

import ast
import re
from importlib import import_module
from pathlib import Path


ROOT = Path(__file__).parents[1]
INTERNAL = ("cli", "engine", "generation.drawing", "trainers.base_trainer")
LISTING = ROOT / "docs" / "api" / "names.txt"


def parameters(node: ast.FunctionDef) -> str:
    """A function's parameters and defaults, without annotations and `self`."""
    for each in ast.walk(node.args):
        if isinstance(each, ast.arg):
            each.annotation = None
    return re.sub(r"^(self|cls)(, )?", "", ast.unparse(node.args))


def lines_of(node: ast.ClassDef | ast.FunctionDef, name: str) -> list[str]:
    """A function, or a class with its own fields and public methods."""
    if isinstance(node, ast.FunctionDef):
        return [f"{name}({parameters(node)})"]
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    fields = {each.target.id: each.value for each in node.body if isinstance(each, ast.AnnAssign)}
    lines = [f"{name}({parameters(methods['__init__'])})" if "__init__" in methods else name]
    lines += [
        f"{name}.{key}" + (f" = {default(value)}" if value else "") for key, value in fields.items() if key[0] != "_"
    ]
    return lines + [f"{name}.{key}({parameters(each)})" for key, each in methods.items() if key[0] != "_"]


def default(value: ast.expr) -> str:
    """The default of a field, also where a call such as `field(default=...)` wraps it."""
    if isinstance(value, ast.Call):
        named = {each.arg: each.value for each in value.keywords}
        value = named.get("default", named.get("default_factory", value.args[0] if value.args else value))
    return ast.unparse(value)


def listing() -> str:
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "api").glob("*.md")))
    lines = []
    for target in re.findall(r"^::: ([\w.]+)", text, re.MULTILINE):
        path = ROOT / f"{target.replace('.', '/')}.py"
        if path.exists():
            names = None
        elif (path.with_suffix("") / "__init__.py").exists():
            path, names = path.with_suffix("") / "__init__.py", None
        else:
            package, _, name = target.rpartition(".")
            home = getattr(import_module(package), name).__module__
            target, names, path = home, [name], ROOT / f"{home.replace('.', '/')}.py"
        if target.removeprefix("trl_repulse.").startswith(INTERNAL):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or node.name.startswith("_"):
                continue
            if names is None or node.name in names:
                lines += lines_of(node, f"{target}.{node.name}")
    return "\n".join(sorted(set(lines))) + "\n"


if __name__ == "__main__":
    LISTING.write_text(listing(), encoding="utf-8")
