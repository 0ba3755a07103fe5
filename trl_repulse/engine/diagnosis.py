"""Symptoms of failure in the log of a training run. Each has a section in docs/reading_a_run.md. Needs only the standard library."""

import contextlib
import json
import math
import operator
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


_STATE = "trainer_state.json"
# Metric that not every run logs -> with what it is logged
_WHEN = {
    "kl": "`beta` above 0",
    "proposal/log_z_gap": "a learned proposal",
    "proposal/distinct": "a learned proposal or the hot policy",
    "proposal/reward": "a learned proposal",
    "proposal/ess": "a learned proposal",
    "negative/p_bad": "the hot policy, once `bad_reward_threshold` is known",
}


class Unknown(Exception):
    """Why a symptom cannot be looked for; not an error of the user."""


class Span(NamedTuple):
    """The mean of a metric over the updates from `first` to `last`."""

    first: int
    last: int
    mean: float

    def __str__(self) -> str:
        return f"updates {self.first} to {self.last}"


_mean_of = operator.attrgetter("mean")


class RunLog:
    """A run's `log_history`, by metric, with the known fields of its configuration. Means are over [`UPDATES`] updates."""

    def __init__(self, history: Iterable[dict[str, Any]], settings: dict[str, Any]):
        self.settings = settings
        self.columns: dict[str, list[tuple[int, float]]] = {}  # metric -> update and value, in order
        for entry in history:
            step = entry.get("step")
            step = int(step) if isinstance(step, int | float) and math.isfinite(step) else 0
            for name, value in entry.items():
                if name != "step" and (value is None or isinstance(value, int | float)):  # TRL logs `None` for NaN
                    self.columns.setdefault(name, []).append((step, math.nan if value is None else float(value)))
        # A value describes the updates since the log before it
        self.steps = sorted(
            {step for name in ("reward", "loss") for step, _ in self.columns.get(name, ()) if step > 0}
        )
        self._before = dict(zip(self.steps, [0, *self.steps], strict=False))

    @property
    def updates(self) -> int:
        return self.steps[-1] if self.steps else 0

    def spans(self, name: str) -> list[Span]:
        """For each log, the mean of a metric over the fewest logs up to it that cover enough updates. Raises [`Unknown`] if there are none."""
        if name not in self.columns:
            when = f": it is logged with {_WHEN[name]}" if name in _WHEN else ""
            raise Unknown(f"the log has no `{name}`{when}")
        points = [(step, value) for step, value in self.columns[name] if step in self._before and math.isfinite(value)]
        spans: list[Span] = []
        for i in range(len(points)):
            covered, total = 0, 0.0
            for step, value in reversed(points[: i + 1]):
                covered, total = covered + step - self._before[step], total + value * (step - self._before[step])
                if covered >= UPDATES:
                    spans.append(Span(self._before[step] + 1, points[i][0], total / covered))
                    break
        if not spans:
            raise Unknown(f"the log has `{name}` for fewer than the {UPDATES} updates that it takes to judge")
        return spans

    def pairs(self, name: str, other: str) -> list[tuple[Span, Span]]:
        """The means of two metrics over the same updates. Raises [`Unknown`] if there are none."""
        others = {span[:2]: span for span in self.spans(other)}
        pairs = [(span, others[span[:2]]) for span in self.spans(name) if span[:2] in others]
        if not pairs:
            raise Unknown(f"`{name}` and `{other}` are not in the same logs")
        return pairs

    def standard_error(self, name: str) -> float:
        """Standard error of a mean of [`spans`], from the differences of successive logs."""
        points = [value for _, value in self.columns[name] if math.isfinite(value)]
        # Half the mean square of successive differences is the variance of a log
        squares = [(earlier - later) ** 2 / 2 for earlier, later in zip(points, points[1:], strict=False)]
        logs = max(1.0, UPDATES * len(self.steps) / self.updates)  # of a mean
        return math.sqrt(sum(squares) / len(squares) / logs) if squares else 0.0

    def count(self, name: str) -> int:
        """An integer field of the configuration, 0 if unknown."""
        value = self.settings.get(name)
        return value if isinstance(value, int) else 0

    @property
    def proposal_samples(self) -> int:
        """K: the proposal's samples of a prompt, 0 if unknown."""
        return self.count("num_proposal_generations") or self.count("num_generations")

    @property
    def is_hot(self) -> bool:
        """Whether the hot policy drew the extra samples, by the settings or a metric of its own."""
        hot = self.settings.get("proposal") == "hot_policy" and self.settings.get("alpha") != 0
        return hot or "negative/p_bad" in self.columns

    @property
    def spread(self) -> float:
        """Standard deviation of the reward at the start."""
        spread = self.spans("reward_std")[0].mean
        if spread <= 0:
            raise Unknown("`reward_std` is 0 at the start")
        return spread


def load_log(folder: str | Path) -> tuple[Path, list[dict[str, Any]], dict[str, Any]]:
    """Reads the log of a run from its `output_dir` or, if that has gone further, from a checkpoint. Returns the file, the log, and the
    run's settings, empty if no `results.json` or checkpoint has them. Raises a `ValueError` if there is no log, or it cannot be read."""
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"`{folder}` {what}; name the folder of a run.")
    paths = [path for path in (folder / _STATE, *folder.glob(f"checkpoint-*/{_STATE}")) if path.is_file()]
    if not paths:
        raise ValueError(
            f"There is no `{_STATE}` in `{folder}` or in a checkpoint there; name the folder of a run, and call "
            "`trainer.save_state()` at the end of a script of your own."
        )
    states: list[tuple[Path, dict[str, Any]]] = []
    unreadable = []
    for path in paths:
        try:
            states.append((path, _read_json(path)))
        except ValueError as error:  # the last checkpoint of a run that was interrupted
            unreadable.append(error)
    if not states:
        raise unreadable[0]
    states.sort(key=lambda each: step if isinstance(step := each[1].get("global_step"), int) else 0, reverse=True)
    path, state = states[0]
    history = state.get("log_history")
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise ValueError(f"`{path}` has no `log_history`; name the folder of a run that a Trainer has written.")
    known = [path.with_name("results.json"), *(each.with_name("position-0.json") for each, _ in states)]
    found = (_read_json(file).get("settings") for file in known if file.is_file())
    return path, history, next((settings for settings in found if isinstance(settings, dict)), {})


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises a `ValueError` if it cannot be read, or is no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"`{path}` cannot be read ({error}); name another folder, or a checkpoint.") from error
    if not isinstance(content, dict):
        raise ValueError(f"`{path}` is no JSON object; name the folder of a run that a Trainer has written.")
    return content


PAGE = "docs/reading_a_run.md"


# Thresholds, each with its reason

# Symptoms that trainers warn of from the first update on
AT_ONCE = "constant_reward", "jumping_kl", "narrow", "collapse"
PATIENCE = 100  # updates before trainers warn of the others, some of which are common early in a run
UPDATES = 20  # updates that a sign has to last: the means of single batches are too noisy
LOG_Z_GAP = 3.0  # nats; the policy's own samples then show 20 times as much of the target; sound runs are below 0
DISTINCT = 1.5  # distinct completions of a prompt; with all samples alike it is 1, and CTL has no gradient
# Nats per token; collapsed runs ended at 0.1 and less, sound ones in the embedded world at 0.4 and more
ENTROPY = 0.15
ENTROPY_SHARE = 0.25  # of the entropy at the start; a policy that was sure from the start on has not collapsed
ESS = 2.0  # samples; then fewer than two carry the weights; sound runs with 32 samples had more than 10
SAMPLES = 4  # samples of a prompt; with fewer, 1 distinct completion and an ESS near 1 are common
WARM_UP = 0.25  # share of the updates in which a proposal may still be far from its target
DISTANCE = 0.5  # standard deviations of the reward at the start; a proposal that works is farther below the policy
WAY_BACK = 0.5  # of the largest distance between both rewards: noise does not take a proposal half way back
FALL = 0.5  # standard deviations of the reward at the start; means of 20 batches hardly vary by a tenth of one
# Standard errors of a mean over these updates: the largest of many and the last differ by 3, and few prompts an update make noise
NOISE = 6.0
PLATEAU = 0.1  # standard deviations of the reward at the start; less is no gain, but noise
# Times; the KL of sound runs in the embedded world rose by 1.7 times at most once the reward had stopped growing
KL_FACTOR = 2.0
# Nats per completion, of a rise; sound runs in the held-out worlds end at 1.7, after hundreds of updates
KL_JUMP = 2.0
KL_RISE = 0.1  # nats per token; doubling less than that is harmless
EMPTY = 1.1  # tokens; the end token alone is 1, so that nine completions in ten are empty
CLIPPED = 0.5  # of the completions; models that end their completions stay far below
SHORT = 4  # tokens; completions limited to as few are meant to be cut
GAIN = 1.0  # an extra sample is worth as much as one of the policy's
CONSTANT = 1e-6  # of the reward's size, which is what float32 resolves
NOT_FINITE = 0.1  # of the logs; in fp16 the search for a loss scale gives single infinite gradients


@dataclass(frozen=True)
class Symptom:
    """What can be wrong with a run."""

    title: str  # also the heading of its section in docs/reading_a_run.md
    cause: str  # the usual one
    remedy: tuple[str, ...]  # alternatives, the best first; fields to set are in braces
    # The evidence, `None` if there is none; raises `Unknown` if the log does not tell
    sign: Callable[[RunLog], str | None]

    @property
    def anchor(self) -> str:
        """The anchor of its section."""
        return self.title.lower().replace(" ", "-")


# Metrics that should be finite. Others are NaN if there is nothing to average
_FINITE = ("loss", "grad_norm", "kl", "entropy")
_NO_SETTINGS = "`num_generations` is not known, without `results.json` or a checkpoint of these trainers"


@dataclass(frozen=True)
class Finding:
    """A symptom that was found."""

    symptom: str  # key of `SYMPTOMS`
    evidence: str  # the numbers that show it, with their updates
    cause: str  # that of the symptom, as `remedy`, with the values of the run's fields
    remedy: str
    page: str  # of the documentation, with the anchor

    def __str__(self) -> str:
        title = SYMPTOMS[self.symptom].title
        return f"{title}: {self.evidence}. Likely cause: {self.cause}. Remedy: {self.remedy}. See {self.page}"


@dataclass(frozen=True)
class Diagnosis:
    """What a log shows."""

    updates: int  # that the log covers
    findings: list[Finding] = field(default_factory=list)
    sound: list[str] = field(default_factory=list)  # keys of the symptoms that were looked for and not found
    # Key of each symptom that could not be looked for -> the reason
    unknown: dict[str, str] = field(default_factory=dict)


# A function for each symptom returns the evidence, or `None` if the log does not show it, and raises `Unknown` if it cannot tell


def _not_finite(log: RunLog) -> str | None:
    """Losses, norms, KLs or entropies that are NaN or infinite in a tenth of the logs, or in the last one."""
    for name in (prefix + name for prefix in ("", "proposal/", "value/") for name in _FINITE):
        column = log.columns.get(name, [])
        bad = [step for step, value in column if not math.isfinite(value)]
        if bad and (len(bad) > NOT_FINITE * len(column) or not math.isfinite(column[-1][1])):
            return f"`{name}` is not finite in {len(bad)} of {len(column)} logs, from update {bad[0]} to {bad[-1]}"
    return None


def _constant_reward(log: RunLog) -> str | None:
    """The reward, or that of one function, hardly varies in any span, measured by its size."""
    log.spans("reward_std")  # raises `Unknown` without
    of_functions = [name.removesuffix("std") for name in log.columns if re.fullmatch(r"rewards/.+/std", name)]
    names = {"reward_std": "reward"} | {f"{name}std": f"{name}mean" for name in of_functions}
    for name, mean in names.items():
        size = max((abs(value) for _, value in log.columns.get(mean, ())), default=0.0)
        with contextlib.suppress(Unknown):  # a function that gave too few rewards
            spans = log.spans(name)
            if all(span.mean <= CONSTANT * max(size, 1.0) for span in spans):
                return f"`{name}` is {spans[-1].mean:.2g} over updates {spans[0].first} to {spans[-1].last}"
    return None


def _collapse(log: RunLog) -> str | None:
    """The proposal's estimate of log Z is far below that of the policy's samples, or nearly all its samples of a prompt are alike."""
    if log.is_hot:
        raise Unknown("the hot policy is the policy itself, with other logits")
    signs, samples = [], log.proposal_samples
    gap = max(log.spans("proposal/log_z_gap"), key=_mean_of)
    if gap.mean > LOG_Z_GAP:
        signs.append(
            f"`proposal/log_z_gap` is {gap.mean:.1f} nats on average over {gap}, and should be below {LOG_Z_GAP:g}"
        )
    if samples >= SAMPLES:
        same = min(log.spans("proposal/distinct"), key=_mean_of)
        if same.mean * samples < DISTINCT:
            distinct = f"{same.mean * samples:.1f} of a prompt's {samples} samples are distinct"
            signs.append(f"`proposal/distinct` is {same.mean:.3g} on average over {same}: {distinct}")
    if not (signs or samples):
        raise Unknown(f"`proposal/log_z_gap` is sound, but `proposal/distinct` cannot be judged: {_NO_SETTINGS}")
    return "; ".join(signs) or None


def _turned_target(log: RunLog) -> str | None:
    """The proposal's reward is never far below the policy's, or has come back half way to it."""
    if log.is_hot:
        raise Unknown("the hot policy has no target")
    distances = [(own.mean - theirs.mean, theirs) for own, theirs in log.pairs("reward", "proposal/reward")]
    (most, farthest), (distance, last) = max(distances, key=lambda each: each[0]), distances[-1]
    if most < DISTANCE * log.spread:
        return (
            f"`proposal/reward` is never far below `reward`: at most {most:.2g} ({farthest}), with a `reward_std` of "
            f"{log.spread:.2g} at the start"
        )
    if distance < most and last.mean - farthest.mean > WAY_BACK * most:
        return (
            f"`proposal/reward` was {farthest.mean:.3g}, {most:.2g} below `reward` ({farthest}), and has risen to "
            f"{last.mean:.3g}, {distance:.2g} below it ({last})"
        )
    return None


def _ess(log: RunLog) -> str | None:
    """After the proposal's warm-up, fewer than two samples of a prompt carry the importance weights."""
    if log.is_hot:
        raise Unknown("the hot policy weighs the bad samples alone, of which a prompt may have one")
    name = "negative/ess" if "negative/ess" in log.columns else "proposal/ess"
    low = min((span for span in log.spans(name) if span.first > WARM_UP * log.updates), key=_mean_of, default=None)
    samples = log.proposal_samples
    if not samples:
        raise Unknown(_NO_SETTINGS)
    if samples < SAMPLES:
        raise Unknown(f"a prompt has {samples} samples, too few to judge")
    if low is None or low.mean >= ESS:
        return None
    return f"`{name}` is {low.mean:.2f} of {samples} samples on average over {low}"


def _nothing_bad(log: RunLog) -> str | None:
    """No span has a bad output, neither of the policy nor of what looks for them."""
    names = ["bad_fraction", "proposal/bad_fraction"]
    if log.is_hot:
        names[0] = "negative/p_bad"
    elif log.settings.get("potential") != "indicator":
        raise Unknown("a bad output is only a count, unless the hot policy or the indicator potential looks for it")
    elif names[1] not in log.columns:
        names = names[:1]  # the policy is its own proposal
    spans = [log.spans(name) for name in names]
    if any(span.mean > 0 for of_metric in spans for span in of_metric):
        return None
    listed = " and ".join(f"`{name}`" for name in names)
    return f"{listed} {'is' if len(names) == 1 else 'are'} 0 over updates {spans[0][0].first} to {spans[0][-1].last}"


def _finds_no_more(log: RunLog) -> str | None:
    """The hot policy's extra samples are bad no more often than the policy's own, or the gain is below 1."""
    if not log.is_hot:
        raise Unknown("there is no hot policy, as far as log and settings tell")
    names = "proposal/bad_fraction", "bad_fraction"
    spans = [log.spans(name) for name in names]
    extra, own = (statistics.fmean(span.mean for span in of_metric) for of_metric in spans)
    if own >= extra > 0:  # where nothing is found, that is another symptom
        return f"`{names[0]}` is {extra:.2g} and `{names[1]}` {own:.2g} on average"
    gain = log.spans("proposal/gain")[-1] if "proposal/gain" in log.columns else None
    extra, own = (of_metric[-1].mean for of_metric in spans)
    # What extra samples alone find is too rare to move the gain
    if gain is None or gain.mean >= GAIN or extra > own == 0:
        return None
    return f"`proposal/gain` is {gain.mean:.2g} ({gain}), and 1 where extra samples are worth as much as more of the policy's own"


def _rising_kl(log: RunLog) -> str | None:
    """The KL has at least doubled, by 0.1 nats a token or more, since the reward was first near its best."""
    pairs = log.pairs("kl", "reward")
    good = max(reward.mean for _, reward in pairs) - PLATEAU * log.spread
    (before, start), (after, last) = next(pair for pair in pairs if pair[1].mean >= good), pairs[-1]
    if start is pairs[0][1]:
        raise Unknown("`reward` is near its best from the start on, where the KL is 0; see whether the return falls")
    if after.mean < before.mean + KL_RISE or after.mean < KL_FACTOR * before.mean:
        return None
    return (
        f"`kl` rose from {before.mean:.3g} to {after.mean:.3g} nats per token while `reward` went from {start.mean:.3g} "
        f"to {last.mean:.3g} ({start}, and {last})"
    )


def _jumping_kl(log: RunLog) -> str | None:
    """The KL of a completion rises by more than 2 nats in the first 20 updates."""
    lengths = dict(log.columns.get("completions/mean_length", ()))
    kl = [(step, value * lengths[step]) for step, value in log.columns.get("kl", ()) if step in lengths]
    early = [(step, value) for step, value in kl if 0 < step <= UPDATES and math.isfinite(value)]
    if not early:
        log.spans("kl")  # which says why, if it is not logged at all
        raise Unknown(f"`kl` was not logged in the first {UPDATES} updates")
    (first, start), (last, most) = early[0], max(early, key=lambda each: each[1])
    if most - start <= KL_JUMP:  # a policy may begin away from the reference
        return None
    return f"`kl` is {most:.2f} nats per completion at update {last}, from {start:.2f} at update {first}"


def _narrow(log: RunLog) -> str | None:
    """The entropy, or the share of distinct completions of a prompt, has fallen to a fraction of the start's."""
    spans, signs = log.spans("entropy"), []
    first, last = spans[0], spans[-1]
    if last.mean < min(ENTROPY, ENTROPY_SHARE * first.mean) and first.mean > ENTROPY:
        signs.append(f"`entropy` fell from {first.mean:.3g} ({first}) to {last.mean:.3g} nats per token ({last})")
    name, samples = "completions/distinct", log.count("num_generations")
    if samples >= SAMPLES and name in log.columns:
        spans, limit = log.spans(name), DISTINCT / samples
        if spans[-1].mean < limit <= spans[0].mean:
            distinct = f"{spans[-1].mean * samples:.1f} of a prompt's {samples} completions are distinct"
            signs.append(f"`{name}` fell from {spans[0].mean:.3g} to {spans[-1].mean:.3g} ({spans[-1]}): {distinct}")
    return "; ".join(signs) or None


def _falling_return(log: RunLog) -> str | None:
    """The return is below its best by more than noise, and by half a standard deviation of the reward at the start."""
    name = "return" if "return" in log.columns else "reward"
    spans = log.spans(name)
    best, last = max(spans, key=lambda span: span.mean), spans[-1]
    least = max(FALL * log.spread, NOISE * log.standard_error(name))
    if best.mean - last.mean <= least:
        return None
    return (
        f"`{name}` fell from {best.mean:.3g} ({best}) to {last.mean:.3g} ({last}), with a `reward_std` of {log.spread:.2g} "
        "at the start"
    )


def _longest_completion(log: RunLog) -> float:
    """The most tokens that a completion may have, or had if that is unknown."""
    longest = max((value for _, value in log.columns.get("completions/max_length", ())), default=0.0)
    return log.count("max_completion_length") or longest


def _models(log: RunLog, name: str) -> Iterator[str]:
    """Names of a metric for the policy, and for the proposal if there is one."""
    return (metric for metric in (name, f"proposal/{name}") if metric == name or metric in log.columns)


def _empty(log: RunLog) -> str | None:
    """In some span the mean completion of the policy, or of the proposal, is hardly more than an end token."""
    for name in _models(log, "completions/mean_length"):
        short = min(log.spans(name), key=_mean_of)
        if _longest_completion(log) < 2:
            raise Unknown("completions have one token")
        if short.mean <= EMPTY:
            began = log.spans(name)[0].mean
            return f"`{name}` is {short.mean:.2f} tokens on average over {short}, and was {began:.2f} at the start"
    return None


def _cut(log: RunLog) -> str | None:
    """In some span at least half of the completions are cut off, as they were not at the start."""
    for name in _models(log, "completions/clipped_ratio"):
        cut = max(log.spans(name), key=_mean_of)
        if _longest_completion(log) <= SHORT:
            raise Unknown(f"completions of up to {SHORT} tokens are meant to be cut")
        if cut.mean >= CLIPPED:
            began = log.spans(name)[0].mean
            if began >= CLIPPED:
                raise Unknown(
                    f"`{name}` is {began:.2f} from the start on; raise `max_completion_length` unless the limit is meant"
                )
            return f"`{name}` is {cut.mean:.2f} on average over {cut}, and was {began:.2f} at the start"
    return None


# Each may be a consequence of those before it: of the numbers and the reward, the policy, the proposal
SYMPTOMS = {
    "not_finite": Symptom(
        "Losses or gradients that are not finite",
        "the reward has a huge scale, the learning rate is far too high, or fp16 overflows",
        ("scale or clip the reward", "lower {learning_rate}", "set `bf16=True` in place of `fp16=True`"),
        _not_finite,
    ),
    "constant_reward": Symptom(
        "A reward that does not vary",
        "the reward function gives all completions the same number, so that there is nothing to learn",
        (
            "call the reward function on two completions that should differ (of a conversation a completion is a list of messages, with the "
            "text in `completion[0]['content']`), and look at its input with `log_completions=True`",
        ),
        _constant_reward,
    ),
    "empty": Symptom(
        "Completions are empty",
        "the reward pays for saying nothing or, where it is the proposal that says nothing, punishes it more than anything else",
        ("give empty completions the reward of other bad outputs, neither a higher nor a lower one",),
        _empty,
    ),
    "cut": Symptom(
        "Completions are cut off",
        "the policy does not end its completions within {max_completion_length} tokens, or learns to go on because the reward "
        "pays for length",
        ("raise {max_completion_length}", "take length out of the reward"),
        _cut,
    ),
    "jumping_kl": Symptom(
        "The KL jumps at the start",
        "the first updates are too large, before the KL penalty holds them",
        ("lower {learning_rate}", "raise {warmup_steps}", "raise {beta}"),
        _jumping_kl,
    ),
    "falling_return": Symptom(
        "The return falls",
        "the learning rate is too high, the negative term is too strong, or prompts are lost",
        ("lower {learning_rate}", "lower {alpha}", "lower {max_grad_norm}", "raise {beta}"),
        _falling_return,
    ),
    "rising_kl": Symptom(
        "The KL rises without a gain in reward",
        "the policy drifts: the KL penalty is too weak, or the learning rate or the negative term too strong",
        ("raise {beta}", "lower {learning_rate}", "lower {alpha}", "stop where the reward stopped growing"),
        _rising_kl,
    ),
    "narrow": Symptom(
        "The policy has collapsed",
        "the KL penalty is too weak for the scale of the reward, or the learning rate or the negative term too strong",
        ("raise {beta}", "lower {learning_rate}", "lower {alpha}", "go back to an earlier checkpoint"),
        _narrow,
    ),
    "nothing_bad": Symptom(
        "Nothing bad is found",
        "{bad_reward_threshold} is below every reward that is drawn, or bad outputs are too rare for so few samples",
        ("raise {bad_reward_threshold}", "raise {num_proposal_generations}"),
        _nothing_bad,
    ),
    "finds_no_more": Symptom(
        "Extra samples find no more",
        "other logits do not reach this model's bad outputs, or {proposal_temperature} is too high: long completions become broken text",
        (
            "leave `proposal_temperature` unset, so that the run chooses",
            'if it is, train with `ReinforceTrainer`, which draws half as much, or try `proposal="learned"`',
        ),
        _finds_no_more,
    ),
    "turned_target": Symptom(
        "The proposal draws good outputs",
        "the target has turned, because {target_dist_beta} is too weak for the distance between good and bad rewards, or the "
        "proposal has not learned yet",
        ("take {target_dist_beta} further from 0", "raise {proposal_learning_rate}", "stop before the rewards meet"),
        _turned_target,
    ),
    "collapse": Symptom(
        "The proposal has collapsed",
        "the proposal learns faster than it can follow its target, or the target is too sharp",
        ("lower {proposal_learning_rate}", "bring {target_dist_beta} nearer to 0", "go back to an earlier checkpoint"),
        _collapse,
    ),
    "ess": Symptom(
        "One sample carries the weights",
        "{target_dist_beta} is too strong, or the proposal is far from its target",
        ("bring {target_dist_beta} nearer to 0", "raise {num_generations}", "raise {proposal_learning_rate}"),
        _ess,
    ),
}


def diagnose(history: Iterable[dict[str, Any]], settings: dict[str, Any] | None = None) -> Diagnosis:
    """
    Looks for symptoms in the log of a run.

    Args:
        history (`list[dict]`):
            `trainer.state.log_history`.
        settings (`dict`, *optional*):
            Fields of the run's configuration, such as those of `results.json`. Some signs need `num_generations` and
            `max_completion_length`.

    Raises:
        `ValueError`: If the log has no update.

    Example:

    ```python
    >>> from trl_repulse.engine.diagnosis import diagnose

    >>> for finding in diagnose(trainer.state.log_history, trainer.args.to_dict()).findings:
    ...     print(finding)
    ```
    """
    log = RunLog(history, settings or {})
    diagnosis = Diagnosis(log.updates)
    if not log.updates:
        raise ValueError(
            "The log is empty: no update was logged. Set `logging_steps` below the number of updates, and train again."
        )
    for name, symptom in SYMPTOMS.items():
        try:
            evidence = symptom.sign(log)
        except Unknown as reason:
            diagnosis.unknown[name] = str(reason)
            continue
        if evidence is None:
            diagnosis.sound.append(name)
        else:
            cause = _with_values(symptom.cause, log.settings)
            remedy = _with_values(_alternatives(symptom.remedy, log.settings), log.settings)
            diagnosis.findings.append(Finding(name, evidence, cause, remedy, f"{PAGE}#{symptom.anchor}"))
    return diagnosis


def _alternatives(remedy: tuple[str, ...], settings: dict[str, Any]) -> str:
    """Joins the alternatives, without those that name a field that has no effect in this run."""
    if settings and not settings.get("alpha", "potential" in settings):
        remedy = tuple(alternative for alternative in remedy if "{alpha}" not in alternative)
    if settings.get("potential") == "indicator":
        remedy = tuple(alternative for alternative in remedy if "{target_dist_beta}" not in alternative)
    *first, last = remedy
    return f"{', '.join(first)}{',' * (len(first) > 1)} or {last}" if first else last


def _with_values(text: str, settings: dict[str, Any]) -> str:
    """Replaces each `{field}` by its name and its value."""

    def show(found: re.Match[str]) -> str:
        value = settings.get(found[1])
        return f"`{found[1]}`" if value is None else f"`{found[1]}` (now {value})"

    return re.sub(r"\{(\w+)\}", show, text)
