"""Rewards from a function in a user's Python file."""

import hashlib
import importlib.util
import inspect
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ._texts import Messages, as_queries, is_async, pick_labels, read_rewards


_FORMS = "`(prompts, completions, **kwargs)`, as TRL's reward functions, or `(queries, prompts, labels)`"


class FunctionReward:
    """A function in a Python file as a reward; made by [`load_reward_function`]."""

    def __init__(self, path: str | Path, function: str, label_column: str | None = None):
        path = Path(path).expanduser().absolute()
        real = path.resolve()
        self.path = real if real.suffix == ".py" else path  # the Hub's cache links to files without a suffix
        self.function = self.__name__ = function
        self.label_column = label_column
        module = _run(self.path)
        if function not in vars(module):
            names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
            raise ValueError(
                f"`{self.path}` has no function `{function}`, only {', '.join(names) or 'none'}; name one of those."
            )
        self._call = vars(module)[function]
        named = f"`{function}` in `{self.path}`"
        if not callable(self._call) or inspect.isclass(self._call):
            raise ValueError(f"{named} is no function but {self._call!r:.60}; name a function.")
        if is_async(self._call):
            raise ValueError(f"{named} is asynchronous; import it and give it to the trainer itself.")
        parameters = inspect.signature(self._call, follow_wrapped=False).parameters.values()
        # A decorator that passes everything on
        if all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            parameters = inspect.signature(self._call).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        with_names = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._names = {p.name for p in with_names}
        self._required = {p.name for p in with_names if p.default is p.empty}
        self._queries = "queries" in self._names and "completions" not in self._names
        self._picks_labels = label_column is not None and (self._queries or self._takes_all or "labels" in self._names)
        if self._queries:
            fits = self._required <= {"queries", "prompts", "labels"}
        else:
            fits = "completions" in self._names or self._takes_all
        if not fits or any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise ValueError(
                f"`{function}{inspect.signature(self._call)}` in `{self.path}` has no signature of a reward function; write {_FORMS}."
            )

    @property
    def required_columns(self) -> list[str]:
        """Names of what a call must get besides prompts and completions, by the names in the data set."""
        required = set() if self._queries else self._required
        return sorted(required - {"labels"} | {self.label_column} if self._picks_labels else required)

    def __call__(
        self,
        prompts: list[str] | list[Messages],
        completions: list[str] | list[Messages],
        completion_ids: list[list[int]] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """Rewards of completions, as TRL calls a reward function. Raises `ValueError` if the data set lacks a column that
        the function needs, or the function does not return one finite number or `None` a completion."""
        if self._queries:
            arguments = {"queries": as_queries(prompts, completions), "prompts": prompts}
        else:
            arguments = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **kwargs}
        if self._queries or self._picks_labels:
            arguments["labels"] = pick_labels(kwargs, self.label_column, len(prompts))
        where = f"The reward function `{self.function}` of `{self.path}`"
        if lacking := sorted(self._required - arguments.keys()):
            raise ValueError(f"{where} needs `{lacking[0]}`, but the data set has no such column; add it.")
        if self._queries or not self._takes_all:
            arguments = {name: value for name, value in arguments.items() if name in self._names}
        result = self._call(**arguments)
        if isinstance(result, dict):
            result = result.get("rewards")
        if isinstance(result, torch.Tensor):
            result = result.detach().flatten().tolist()
        return read_rewards(result, where, len(prompts))


def load_reward_function(spec: str, label_column: str | None = None) -> FunctionReward:
    """
    Loads a function from a Python file as a reward function for a trainer.

    The names of its parameters decide between two signatures:

    - TRL's, `(prompts, completions, completion_ids, **kwargs)`. Unused parameters may be missing, `**kwargs` too, and
      columns of the data set can be named.
    - OpenRLHF's, `(queries, prompts, labels)`. A query is prompt and completion: text, or a list of messages.

    It returns one number a completion, or `None` to exclude one: as a list, a tensor, or the `"rewards"` of a dictionary. Raises
    `ValueError` if `spec` has another form, the file is missing or fails, or the function is missing or has neither signature.

    Args:
        spec (`str`): File and function, `"path/to/file.py:function"`. The file is run.
        label_column (`str`, *optional*):
            Column of the data set passed as `labels`. Without it, a function of queries gets empty texts, and any
            other function the column of that name.
    """
    path, _, function = spec.rpartition(":")
    if not path.endswith(".py") or not function.isidentifier():
        raise ValueError(f"A reward function is named as 'path/to/file.py:function', got {spec!r}.")
    return FunctionReward(path, function, label_column)


def _is_of_users(name: str, folder: Path) -> bool:
    """Whether a loaded module is a file of a user's in another folder, and not of an installed library."""
    file = Path(getattr(sys.modules[name], "__file__", None) or folder / name)
    installed = (Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    return file.parent != folder and not any(path in file.parents for path in installed)


def _run(path: Path) -> ModuleType:
    """Runs a file as a module, once unless it changes. Its folder is on the path, as in a script, and what it imports from there is not
    taken from another folder. Raises a `ValueError` if it cannot be run."""
    if not path.is_file():
        raise ValueError(f"There is no file `{path}`; give the path of a Python file with a reward function.")
    name = "_trl_repulse_reward_" + hashlib.sha256(f"{path} ".encode() + path.read_bytes()).hexdigest()
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    folder = path.parent
    beside = {file.stem for file in folder.glob("*.py")} & sys.modules.keys()
    namesakes = {each: sys.modules.pop(each) for each in beside if _is_of_users(each, folder)}
    sys.path.insert(0, str(folder))  # for modules beside it, as Python does for a script
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]  # also if a user interrupts it: it has not been run
        if not isinstance(error, Exception):
            raise
        raise ValueError(f"`{path}` cannot be run ({type(error).__name__}: {error}); fix it first.") from error
    finally:
        sys.modules.update(namesakes)
        sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))  # for imports inside its functions, behind all others
    return module
