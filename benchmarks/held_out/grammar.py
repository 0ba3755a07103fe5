"""
Weighted grammars of the held-out worlds: prompts, replies of ten to twenty words, and what is bad about a reply.

A world is a set of rules. A rule is a list of productions `(weight, text, score)`; `<name>` in a text expands a rule, and
an expansion is remembered under its name, so that a reply can take up the item that its prompt named. Scores add up along
a reply: the quality that preferences are drawn from. A production of the rule `bad` is a *construction*: one way of being
rude, with the phrases by which it is recognised in any text.

A word is one token that carries its own leading space, if it has one; punctuation is one token.
"""

import math
import random
import re
from dataclasses import dataclass, field


Production = tuple[float, str, float]
_SLOT = re.compile(r"<(\w+)>")
TOKEN = r" ?[a-zA-Z]+|[^a-zA-Z ]"


def split_tokens(text: str) -> list[str]:
    """A text's tokens; joining them gives the text back."""
    return re.findall(TOKEN, text)


@dataclass
class Reply:
    """A reply drawn from a world: its text (with the leading space of its first word), its quality, how it is bad."""

    text: str
    score: float
    construction: str | None


@dataclass
class Prompt:
    """A prompt: its text, what its slots were filled with, and the share of its replies that are rude."""

    text: str
    slots: dict[str, str]
    rude_rate: float


@dataclass
class World:
    """
    A grammar of prompts and replies.

    Args:
        name (`str`):
            Name of the world.
        prompts (`list[tuple[str, float]]`):
            Shapes of prompts, each with the log-odds that it adds to those of a rude reply.
        rules (`dict[str, list]`):
            Productions by rule. `reply` is the start of a decent reply.
        constructions (`dict[str, tuple]`):
            Rude replies by construction: weight, text, score, and phrases that tell it, one of which is enough.
        insults (`frozenset[str]`):
            Words that make a slip wherever they are said of a person or of the customer's things.
        slips (`dict[str, str]`):
            Rules one of whose words is replaced in a slip, each with the rule the word is drawn from.
        rude_log_odds (`float`):
            Log-odds of a rude reply.
        slip_share (`float`):
            Share of the rude replies that are slips: decent replies with one insult.
        slip_score (`float`):
            Score of a slip in a reply of score 0; a fifth of the reply's own is added.
    """

    name: str
    prompts: list[tuple[str, float]]
    rules: dict[str, list[Production]]
    constructions: dict[str, tuple[float, str, float, tuple[str, ...]]]
    insults: frozenset[str]
    slips: dict[str, str]
    rude_log_odds: float = -5.0
    slip_share: float = 0.25
    slip_score: float = -5.8
    _weights: dict[str, list[float]] = field(default_factory=dict, repr=False)

    def __post_init__(self):
        self._weights = {name: [weight for weight, *_ in rule] for name, rule in self.rules.items()}

    def expand(self, text: str, slots: dict[str, str], rng: random.Random) -> tuple[str, float]:
        """A text without slots, and the scores that its expansions add; `slots` is filled and what it holds is taken up."""
        score = 0.0

        def fill(match: re.Match) -> str:
            nonlocal score
            name = match[1]
            if name in slots:
                return slots[name]
            _, production, value = rng.choices(self.rules[name], self._weights[name])[0]
            filled, below = self.expand(production, slots, rng)
            score += value + below
            # Rules in capitals are drawn afresh wherever they stand
            return filled if name.isupper() else slots.setdefault(name, filled)

        return _SLOT.sub(fill, text), score

    def draw_prompt(self, rng: random.Random) -> Prompt:
        """A prompt."""
        shape, log_odds = rng.choice(self.prompts)
        slots: dict[str, str] = {}
        text, value = self.expand(shape, slots, rng)
        return Prompt(_tidy(text), slots, 1 / (1 + math.exp(-self.rude_log_odds - log_odds - value)))

    def draw_reply(self, prompt: Prompt, rng: random.Random, rude_rate: float | None = None) -> Reply:
        """A reply to a prompt, rude at the prompt's own rate or at another."""
        slots = dict(prompt.slots)
        if rng.random() >= (prompt.rude_rate if rude_rate is None else rude_rate):
            text, score = self.expand("<REPLY>", slots, rng)
            return Reply(" " + _tidy(text), score, None)
        if rng.random() < self.slip_share:
            slips = list(self.slips)
            while True:  # until the reply has a place for the insult
                attempt = dict(prompt.slots)
                name = rng.choice(slips)
                attempt[name] = f"<{self.slips[name]}>"
                text, score = self.expand("<REPLY>", attempt, rng)
                if _SLOT.search(text):
                    text, _ = self.expand(text, {}, rng)
                    return Reply(" " + _tidy(text), self.slip_score + 0.2 * score, "slip")
        names = list(self.constructions)
        name = rng.choices(names, [self.constructions[name][0] for name in names])[0]
        _, text, score, _ = self.constructions[name]
        text, value = self.expand(text, slots, rng)
        return Reply(" " + _tidy(text), score + value, name)

    def construction_of(self, reply: str) -> str:
        """How a bad reply is bad: the construction whose phrases it has, `slip` for an insult elsewhere, or `other`."""
        for name, (*_, phrases) in self.constructions.items():
            if any(phrase in reply for phrase in phrases):
                return name
        return "slip" if self.insults & set(re.findall("[a-z]+", reply)) else "other"

    def vocabulary(self) -> list[str]:
        """All tokens that prompts and replies can have, sorted."""
        texts = [shape for shape, _ in self.prompts]
        texts += [text for rule in self.rules.values() for _, text, _ in rule]
        texts += [text for _, text, *_ in self.constructions.values()]
        words = {token for text in texts for token in split_tokens(_tidy(_SLOT.sub(" ", text)))}
        starts = {split_tokens(_tidy(_SLOT.sub(" ", shape)))[0] for shape, _ in self.prompts}
        # What follows a slot lacks its space here
        return sorted(starts | {f" {word.strip()}" if word.strip().isalpha() else word for word in words})


def _tidy(text: str) -> str:
    """Single spaces, and none before punctuation or at the ends."""
    return re.sub(r" +([.,!?:;])", r"\1", " ".join(text.split()))
