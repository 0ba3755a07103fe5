"""Tools and environments of the trajectories that are drawn for a negative term.

This repeats how TRL's GRPO trainer (1.16) sets up environments and tools of a batch, inside `_generate_and_score_completions`:
instances are taken from a pool and reset, and each row gets the methods of its own. A test compares both.
Way out: a method of TRL's trainer that does it for given rows.
"""

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from accelerate.logging import get_logger
from trl import GRPOTrainer

from ..configs import NegativeTermConfig, RePULSeGRPOConfig


logger = get_logger(__name__)

Factory = Callable[[], Any]

_BATCH_ATTRIBUTES = ("environments", "_batch_environments", "_sync_tool_dicts", "_async_tool_dicts")


def refuse_acting(args: NegativeTermConfig, given: dict[str, Any]) -> None:
    """For [`RePULSePPOTrainer`]: raises a `ValueError` if what writes into completions is among its arguments, `given` by name, unless
    `alpha` is 0."""
    for name in ("tools", "rollout_func", "environment_factory"):
        if given.get(name) and (args.alpha or 0) > 0:
            raise ValueError(
                f"`{name}` does not go with a negative term on this trainer; use `RePULSeGRPOTrainer`, or set `alpha=0`."
            )


def check_acting(args: RePULSeGRPOConfig, given: dict[str, Any], factory: Any) -> None:
    """
    For [`RePULSeGRPOTrainer`]: refuses to let a proposal, or the hot policy, act unless the user allows it. `given` are the trainer's
    other arguments by name, and `factory` is its `proposal_environment_factory`.

    Raises:
        `ValueError`: If it would act with tools or in environments that were not allowed, or would be drawn by a user's
            `rollout_func`; or if a factory has no use.
    """
    own = given.get("environment_factory")
    if factory is not None and (own is None or not args.draws_twice):
        missing = "an `environment_factory`" if own is None else "completions of a proposal, or of a hotter policy"
        raise ValueError(f"`proposal_environment_factory` has no effect without {missing}; leave it out.")
    if not args.draws_twice:
        return
    actor = "The proposal" if args.has_proposal else "The policy, drawn hotter,"
    remedy = "Set `alpha=0`, or `proposal='policy'`, which draws nothing more"
    if given.get("rollout_func"):
        raise ValueError(
            f"{actor} would have to be drawn by your `rollout_func`, and nothing says which model that samples from and at which "
            f"temperature: importance weights could be wrong unnoticed. Pass `tools` or an `environment_factory` instead. {remedy}."
        )
    names = [name for name in ("tools", "environment_factory") if given.get(name)]
    if not names:
        return
    if not args.proposal_tools:
        raise ValueError(
            f"{actor} draws completions of its own to find the policy's worst behaviour, and would act with your `{names[0]}` as badly "
            "as it can. If nothing that it does there matters, say so with `proposal_tools=True`"
            f"{' and a `proposal_environment_factory`' if own is not None else ''}. {remedy}."
        )
    if own is None:
        return
    if factory is None:
        raise ValueError(
            "`proposal_tools=True` with an `environment_factory` needs a `proposal_environment_factory`, which makes the environments "
            "that the proposal acts in: a sandbox or, if nothing that it does there matters, the same factory once more."
        )
    if isinstance(own, dict) != isinstance(factory, dict) or (isinstance(own, dict) and set(own) != set(factory)):
        raise ValueError(
            "`proposal_environment_factory` must have the form of `environment_factory`: one callable, or a dictionary with the same names."
        )


class ProposalWorld:
    """
    The trainer's tools, and own environments, for the trajectories that are drawn for a negative term.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Trainer with tools or environments.
        factory (`Callable` or `dict[str, Callable]`, *optional*):
            Makes the environments, if there are any.

    Raises:
        `ValueError`: If an environment has other tools than the policy's, or another type where the policy's gives rewards.
    """

    def __init__(self, trainer: GRPOTrainer, factory: Factory | dict[str, Factory] | None):
        self._trainer = trainer
        named: Any = factory if isinstance(factory, dict) else {None: factory}
        self._factories: dict[str | None, Factory] = {} if factory is None else named
        self._pool: dict[str | None, list[Any]] = {}
        for name, make in self._factories.items():
            self._pool[name] = [make()]
            _check_alike(self._pool[name][0], trainer._environment_pool[name][0])
        logger.warning(
            "`proposal_tools=True`: what looks for the policy's worst behaviour calls these tools, again and again, with the worst "
            "arguments it finds, and they take effect: %s. Give it tools that nothing depends on, a sandbox and no real accounts.",
            ", ".join(tool.__name__ for tool in trainer.tools),
        )

    @contextlib.contextmanager
    def acting(self, rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
        """Context in which the trainer's hooks for generation and rewards use these environments, reset for each row. It gives the rows, one
        a completion, with the first observations in their prompts."""
        trainer: Any = self._trainer
        before = {name: value for name, value in vars(trainer).items() if name in _BATCH_ATTRIBUTES}
        try:
            environments = []
            if trainer.environment_factories is not None:
                names = [row["environment"] if trainer._multi_environment else None for row in rows]
                trainer._batch_environments, num_taken = names, Counter[str | None]()
                for name in names:
                    if num_taken[name] == len(self._pool[name]):
                        self._pool[name].append(self._factories[name]())
                    environments.append(self._pool[name][num_taken[name]])
                    num_taken[name] += 1
            trainer.environments = environments or None
            tools = [
                {tool.__name__: tool for tool in (*trainer._standalone_tools, *_methods(environment).values())}
                for environment in environments or [None] * len(rows)
            ]
            is_async = inspect.iscoroutinefunction
            trainer._sync_tool_dicts = [{k: v for k, v in row.items() if not is_async(v)} for row in tools]
            trainer._async_tool_dicts = [{k: v for k, v in row.items() if is_async(v)} for row in tools]
            if environments:
                rows = [self._begin(row, own) for row, own in zip(rows, environments, strict=True)]
            yield rows
        finally:
            vars(trainer).update(before)

    def _begin(self, row: dict[str, Any], environment: Any) -> dict[str, Any]:
        """Resets an environment for a row. Returns the row, with the first observation, if any, at the end of the prompt's last message."""
        fields = {k: v for k, v in row.items() if k != "environment"} if self._trainer._multi_environment else row
        prompt = row.get("prompt", [{"role": "user", "content": ""}])
        observation = environment.reset(**fields)
        if observation is None:
            return row | {"prompt": prompt}
        content = prompt[-1]["content"]
        if isinstance(observation, list) and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if isinstance(observation, str) and isinstance(content, list):
            observation = [{"type": "text", "text": observation}]
        return row | {"prompt": [*prompt[:-1], prompt[-1] | {"content": content + observation}]}


def _methods(environment: Any) -> dict[str, Callable]:
    """The tools of an environment by name: its public methods, but for TRL's `reset` and `get_reward`."""
    functions = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    names = [name for name, _ in functions if name not in ("reset", "get_reward") and not name.startswith("_")]
    return {name: getattr(environment, name) for name in names}


def _check_alike(environment: Any, own: Any) -> None:
    """Raises a `ValueError` for an environment of a proposal in which completions would mean something else than in the policy's `own`."""
    tools, own_tools = sorted(_methods(environment)), sorted(_methods(own))
    if tools != own_tools:
        raise ValueError(
            f"`proposal_environment_factory` makes a {type(environment).__name__} with the tools {', '.join(tools)}, and the policy acts "
            f"with {', '.join(own_tools)}; give both the same."
        )
    if getattr(own, "get_reward", None) is not None and type(environment) is not type(own):
        raise ValueError(
            f"`proposal_environment_factory` makes a {type(environment).__name__}, and TRL asks for rewards only where the environment is a "
            f"{type(own).__name__} itself; make one of these, in a sandbox, or give the reward with `reward_funcs`."
        )
