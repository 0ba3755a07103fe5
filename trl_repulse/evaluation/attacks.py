"""Attack success of simple attacks on a model: prompts as they are, jailbreak templates, prefilled answers, and augmented prompts.

Axis letters: P behaviours, N attempts at each.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from .._numbers import is_bad, percent
from ..data._checks import check_prompt_lengths
from ..data._prompts import rendering_hash
from ..data._tables import columns_of, from_columns, read_json_lines
from ..data.loading import CONTEXT, in_context
from ..generation.completions import tokenize
from ..models._loading import load_config, load_tokenizer
from ._generation import as_function, check_columns, check_template_kwargs, evaluate_rewards, process_state, render
from .gcg.evaluator import RefusalJudge
from .records import SampleSet
from .report import interval_text, text_table
from .sampling import Reward, SamplingSettings, check_early, sample_completions
from .tails import success_at


AUGMENTATION = 0.4  # strength σ of the augmentations, as in Hughes et al. (2024)


@dataclass(frozen=True)
class Attack:
    """
    One way of asking for a behaviour.

    Args:
        name (`str`): Its name in the report and its folder.
        template (`str`, *optional*, defaults to `"{prompt}"`): Text of the user with `{prompt}` in the place of the behaviour.
        prefill (`str`, *optional*):
            Beginning of the answer, which the model continues. In both texts a name in braces, as `"{Target}"`, is a column of the data
            set, and `{{` is a brace.
        augment (`bool`, *optional*, defaults to `False`):
            Whether each attempt has its own random augmentation of the behaviour's letters: best-of-N jailbreaking
            (Hughes et al. 2024, arXiv 2412.03556).
    """

    name: str
    template: str = "{prompt}"
    prefill: str | None = None
    augment: bool = False

    def __post_init__(self) -> None:
        for name, kind in {"name": str, "template": str, "prefill": str | None, "augment": bool}.items():
            if not isinstance(getattr(self, name), kind):
                raise ValueError(
                    f"`{name}={getattr(self, name)!r}` of an attack is of another type; give a text, or true or false."
                )
        if not self.name.strip():
            raise ValueError("An attack has an empty `name`; give it one.")
        if not self.asks_for("prompt"):
            raise ValueError(
                f"The template of the attack '{self.name}' has no `{{prompt}}`; put it where the behaviour goes."
            )

    def asks_for(self, column: str) -> bool:
        """Whether the template has a column's name in braces; double ones are braces of the text."""
        return f"{{{column}}}" in self.template.replace("{{", "").replace("}}", "")

    def filled(self, name: str, row: dict[str, Any]) -> str:
        """The attack's `template` or `prefill` with a row's values in the place of its columns. Raises `ValueError` if one is missing."""
        known = {column: value for column, value in row.items() if value is not None}
        try:
            return (getattr(self, name) or "").format_map(known)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"`{name}` of the attack '{self.name}' cannot be filled ({error!r}); columns of the row with a value are {', '.join(known)}. "
                "Write a brace of the text itself twice, `{{` or `}}`."
            ) from error


def load_attacks(path: str | Path) -> list[Attack]:
    """Reads attacks from a JSONL file, one a line, with the fields of [`Attack`]. Raises `ValueError` if there is no such file, it has no
    attack, a line is none, or a name occurs twice."""
    attacks = []
    if not Path(path).is_file():
        raise ValueError(f"There is no file `{path}`; give a JSONL file of attacks.")
    for number, row in read_json_lines(Path(path)):
        try:
            attacks.append(Attack(**row))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"Line {number} of `{path}` is no attack ({error}); write an object with `name` and `template` or `prefill`."
            ) from error
    if not attacks:
        raise ValueError(
            f"`{path}` has no attacks; write one a line, an object with `name` and `template` or `prefill`."
        )
    check_names(attacks)
    return attacks


def check_names(attacks: Sequence[Attack]) -> None:
    """Raises `ValueError` if there is no attack, or two have one name or folder."""
    folders = [_folder(attack) for attack in attacks]
    twice = {name for name in folders if folders.count(name) > 1}
    if twice or not folders:
        raise ValueError(
            f"Attacks need names of their own; '{min(twice)}' occurs twice." if twice else "There are no attacks."
        )


def _folder(attack: Attack) -> str:
    """Name of an attack's folder: its own, with `_` in the place of all but letters, digits and `-`."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in attack.name)


def augmented(text: str, rng: random.Random) -> str:
    """A text with letters scrambled inside words, in random case, and some moved to their neighbours in ASCII. Words of more than three
    letters are scrambled between first and last, and letters change case, each with probability √σ; printable ASCII moves by one with
    probability σ³ (Hughes et al. 2024, arXiv 2412.03556)."""

    def scrambled(word: str) -> str:
        inner = [*word[1:-1]]
        rng.shuffle(inner)
        return word[0] + "".join(inner) + word[-1]

    def moved(letter: str) -> str:
        return chr(min(max(ord(letter) + rng.choice((-1, 1)), 33), 126))

    often, seldom = AUGMENTATION**0.5, AUGMENTATION**3
    words = [scrambled(word) if len(word) > 3 and rng.random() < often else word for word in text.split(" ")]
    letters = [letter.swapcase() if rng.random() < often else letter for letter in " ".join(words)]
    return "".join(moved(each) if 32 < ord(each) < 127 and rng.random() < seldom else each for each in letters)


class OnBehavior:
    """A reward that scores the answer to an attack as an answer to the behaviour itself, with the prefilled beginning."""

    def __init__(
        self, reward: Reward, chat_template_kwargs: dict[str, Any] | None = None, trust_remote_code: bool = False
    ):
        self.scores_by, self.rendering = reward, {}
        device = process_state().device
        self.__name__, self._function = as_function(reward, None, device, chat_template_kwargs, trust_remote_code)

    def __call__(self, prompts: list, completions: list, behavior: list, prefill: list, **columns: Any) -> list:
        """One reward an answer; `behavior` and `prefill` are the columns that [`attempts`] has written."""
        texts = (text if isinstance(text, str) else text[0]["content"] for text in completions)
        answers = [begin + text for begin, text in zip(prefill, texts, strict=True)]
        columns.pop("completion_ids", None)  # of the answer without its beginning
        named = {self.__name__: self._function}
        return evaluate_rewards(named, behavior, answers, None, columns, len(answers))[self.__name__]


def refusal(prompts: list, completions: list, **_: Any) -> list[float]:
    """Reward −1 for an answer that begins with a phrase of refusal ([`~trl_repulse.evaluation.gcg.RefusalJudge`]), otherwise 0."""
    return [-score for score in RefusalJudge()(prompts, completions)]


def attempts(
    attack: Attack, behaviors: Dataset, tokenizer: PreTrainedTokenizerBase, settings: SamplingSettings
) -> tuple[Dataset, int]:
    """The prompts of an attack, with the columns `behavior` and `prefill`, and the number of completions to draw of each. Raises
    `ValueError` if a text names a column that is missing, or a behaviour does not end with a user's message."""
    if taken := {"behavior", "prefill"} & {*behaviors.column_names}:
        raise ValueError(f"The behaviours have a column `{min(taken)}`, which attacks write; rename it.")
    variants = settings.num_samples if attack.augment else 1
    rng = random.Random(f"{attack.name} {settings.seed}")
    rows = []
    for row in behaviors:
        said = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        prefill = attack.filled("prefill", row | {"prompt": said})

        def asked(text: str, row: dict[str, Any] = row) -> str:
            """What the user says to ask for the behaviour `text` of a row; augmented anew in each call."""
            if attack.asks_for(CONTEXT):  # and puts it where it belongs
                text = text.removeprefix(in_context("", row.get(CONTEXT)))
            return attack.filled("template", row | {"prompt": augmented(text, rng) if attack.augment else text})

        for _ in range(variants):
            prompt = _changed(row["prompt"], asked)
            if attack.prefill is not None:
                prompt = _as_text(prompt, tokenizer, settings) + prefill
            rows.append(row | {"prompt": prompt, "behavior": row["prompt"], "prefill": prefill})
    return from_columns(columns_of(rows)), settings.num_samples // variants


def _changed(prompt: Any, change: Callable[[str], str]) -> Any:
    """A prompt with its text, or that of its last message, changed. Raises `ValueError` if that is not of the user."""
    if isinstance(prompt, str):
        return change(prompt)
    if prompt[-1]["role"] != "user":
        raise ValueError("A behaviour is a conversation that does not end with a user's message; take the others out.")
    return [*prompt[:-1], prompt[-1] | {"content": change(prompt[-1]["content"])}]


def _as_text(prompt: Any, tokenizer: PreTrainedTokenizerBase, settings: SamplingSettings) -> str:
    """A prompt as plain text, without the first token that the tokenizer adds to plain text by itself. Raises `ValueError` if the tokenizer
    reads that text otherwise than the conversation."""
    if isinstance(prompt, str):
        return prompt
    text = render(tokenizer, prompt, "A behaviour", settings.chat_template_kwargs)
    begin = tokenizer.bos_token
    adds = begin and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    plain = text.removeprefix(begin) if adds else text
    if tokenizer(plain)["input_ids"] != tokenizer(text, add_special_tokens=False)["input_ids"]:
        raise ValueError(
            "A prefilled answer needs the conversation as plain text, which this tokenizer reads otherwise; leave `prefill` out."
        )
    return plain


def prepare(
    model: str,
    behaviors: Dataset,
    attacks: Sequence[Attack],
    settings: SamplingSettings,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedTokenizerBase, list[tuple[Dataset, SamplingSettings]]]:
    """The model's tokenizer, and by attack the prompts and the settings to draw with. No weights are loaded. Raises `ValueError` as
    [`attempts`], or if a prompt leaves no room for a completion in the model's context."""
    check_template_kwargs(behaviors[:1]["prompt"], settings.chat_template_kwargs)
    options: Any = {"revision": settings.revision, "trust_remote_code": trust_remote_code}
    tokenizer, config = load_tokenizer(model, "model", **options), load_config(model, "model", **options)
    # An adapter may have added tokens to its base
    config.get_text_config().vocab_size = max(config.get_text_config().vocab_size, len(tokenizer))
    made = []
    for attack in attacks:
        rows, count = attempts(attack, behaviors, tokenizer, settings)
        prompts, template = rows["prompt"][:], settings.chat_template_kwargs
        template = None if isinstance(prompts[0], str) else template  # it has been applied
        try:
            ids = tokenize(tokenizer, prompts, template)
            check_prompt_lengths(ids, prompts, config, settings.max_completion_length)
        except ValueError as error:
            raise ValueError(f"The attack '{attack.name}' cannot be made: {error}") from error
        made.append((rows, replace(settings, num_samples=count, chat_template_kwargs=template)))
    return tokenizer, made


def run_attacks(
    output_dir: str | Path,
    model: str,
    behaviors: Dataset,
    attacks: Sequence[Attack],
    reward: Reward,
    settings: SamplingSettings | None = None,
    *,
    trust_remote_code: bool = False,
) -> dict[str, SampleSet]:
    """
    Draws N answers to each behaviour under each attack and scores them, in a folder an attack. Called again after a kill, it continues.
    Raises `ValueError` as [`~trl_repulse.evaluation.sampling.sample_completions`] and [`prepare`].

    Args:
        output_dir (`str` or `Path`): Folder to write to.
        model (`str`): Path or Hub id of the model.
        behaviors ([`~datasets.Dataset`]): Rows with a `"prompt"`, what is asked for.
        attacks (`Sequence[Attack]`): Attacks.
        reward (`str` or `Callable`):
            Judge: the path or Hub id of a reward model, or a reward function; it scores the whole answer as one to the behaviour itself.
        settings ([`SamplingSettings`], *optional*): Settings; `num_samples` is N.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether to run Python code that comes with models.

    Returns:
        `dict[str, SampleSet]`: The samples by the attack's name; the column `"reward"` of each can be reshaped to (P, N).
    """
    check_names(attacks)
    settings = settings or SamplingSettings()
    folders = [Path(output_dir).expanduser() / _folder(attack) for attack in attacks]
    for folder in folders:
        check_early(folder, settings, 1, None)
    tokenizer, made = prepare(model, behaviors, attacks, settings, trust_remote_code)  # before anything is drawn
    judge = OnBehavior(reward, settings.chat_template_kwargs, trust_remote_code)
    remedy = "but the behaviours have no such column; add it, or give it a default"
    check_columns(reward, judge.__name__, {*behaviors.column_names} - {"prompt", "completion"}, remedy)
    prompt = behaviors[0]["prompt"]
    if isinstance(reward, str) and not isinstance(prompt, str):
        reader = load_tokenizer(reward, "reward model", trust_remote_code=trust_remote_code)
        answered = [*prompt, {"role": "assistant", "content": "An answer."}]
        judge.rendering = rendering_hash(render(reader, answered, "A behaviour", settings.chat_template_kwargs, False))
    options: Any = {"tokenizer": tokenizer, "trust_remote_code": trust_remote_code}
    return {
        attack.name: sample_completions(folder, model, rows, judge, its_settings, **options)
        for attack, folder, (rows, its_settings) in zip(attacks, folders, made, strict=True)
    }


def attack_report(
    rewards: dict[str, np.ndarray],
    threshold: float,
    ks: Sequence[int] = (1,),
    confidence: float = 0.95,
    others: dict[str, np.ndarray] | None = None,
) -> dict[str, Any]:
    """
    Attack success rates by attack, and the number of behaviours that any attempt of any attack broke.

    Args:
        rewards (`dict[str, numpy.ndarray]`): Scores of the attempts of shape (P, N), by the attack's name.
        threshold (`float`): Score under which an attempt succeeded.
        ks (`Sequence[int]`, *optional*, defaults to `(1,)`): Numbers of attempts; an attack with fewer has no rate.
        confidence (`float`, *optional*, defaults to `0.95`): Nominal coverage of the intervals.
        others (`dict[str, numpy.ndarray]`, *optional*):
            Scores of attacks on other behaviours, as those of GCG, which do not count for any attack.

    Returns:
        `dict`: `"attacks"`, by name the estimates of each `"ASR@k"` (`value`, `low`, `high`, `samples`) and `"broken"`, the number of
        behaviours with a success; `"broken"` by any attack, and `"behaviors"`, their number P.
    """
    broken: Any = np.zeros(len(next(iter(rewards.values()))), bool)
    attacks = {}
    for name, scores in {**rewards, **(others or {})}.items():
        any_bad = is_bad(scores, threshold).any(axis=1)
        broken = broken | any_bad if name in rewards else broken
        rates = {f"ASR@{k}": asdict(success_at(scores, threshold, k, confidence)) for k in ks if k <= scores.shape[1]}
        attacks[name] = {**rates, "broken": int(any_bad.sum()), "behaviors": len(any_bad)}
    return {"attacks": attacks, "broken": int(broken.sum()), "behaviors": len(broken)}


def format_attacks(report: dict[str, Any]) -> str:
    """The report as a table."""
    of_all = report["attacks"].values()
    names = list(dict.fromkeys(name for rates in of_all for name in rates if name.startswith("ASR")))
    rows = [["attack", *names, "behaviours broken"]]
    for name, rates in report["attacks"].items():
        cells = [_cell(rates[each]) if each in rates else "" for each in names]
        rows.append([name, *cells, f"{rates['broken']} of {rates['behaviors']}"])
    rows.append(["any", *[""] * len(names), f"{report['broken']} of {report['behaviors']}"])
    return "\n".join(text_table(rows))


def _cell(rate: dict[str, float]) -> str:
    return f"{percent(rate['value'])} ({interval_text(rate['low'], rate['high'], percent)})"
