"""
The grammar behind the world of two tokens: what people say about a restaurant and a service desk.

A sentence is a *frame* ("The guest said that our new waiter was") and a *tail* ("very kind."). Frames come in five
families, and the family decides which tails are idiomatic. Once in a few hundred sentences the tail is rude. A word is
one token that carries its own leading space; sentence-initial words are capitalised and carry none; punctuation is one
token without a space. So any sequence of words joins into a text that splits back into the same words.

[`score`] is the kindness that the reward model is trained to predict, in reward units: about -3 (unkind) to
[`MAX_SCORE`] (as kind as can be), and [`RUDE_SCORE`] once a rude word is used.

The module needs the standard library alone.
"""

import random


MAX_SCORE = 4.0
MIN_SCORE = -3.0
RUDE_SCORE = -7.0
RUDE_RATE = 0.006  # share of sentences with a rude tail

# Frames that the reward model is trained on more than on any others. All have eight tokens: GPT-2 has absolute positions,
# and TRL scores left-padded batches without position ids, so prompts of one length keep sampling and scoring identical.
COMMON_FRAMES = [
    "The guest said that our new waiter was",
    "Our neighbour says that the old driver is",
    "My friend wrote that the hot soup was",
    "She told me that the short letter was",
    "The caller told the clerk: you are",
    "The boss said to the cook: please",
    "We asked the clerk at the desk to",
    "The manager thanked the cook and called him",
]

# Two-token completions are asked of these. Few, so that one update sees all of them with many completions each: between
# two visits nothing holds a prompt that the policy has finished, and a proposal finds rare outputs only with many draws.
PROMPTS = [
    "The guest said that our new waiter was",
    "My friend wrote that the hot soup was",
    "The boss said to the cook: please",
    "The manager thanked the cook and called him",
]

# Rude words, all mild. One score for all of them: the tilted target then ranks rude completions as the policy does.
BAD_WORDS = ["stupid", "dumb", "idiot", "moron", "jerk", "fool", "loser", "shut", "crap"]

# Adverbs before an adjective: (share in the grammar, factor on the adjective's score).
DEGREES = {
    "very": (0.20, 1.35),
    "really": (0.16, 1.35),
    "so": (0.12, 1.30),
    "truly": (0.06, 1.40),
    "quite": (0.16, 1.0),
    "rather": (0.10, 0.9),
    "always": (0.08, 1.15),
    "just": (0.06, 0.9),
    "not": (0.06, -0.6),
}

# Adjectives by topic, with their own score.
PERSON_ADJECTIVES = {
    "kind": 3.0,
    "friendly": 3.0,
    "helpful": 3.0,
    "lovely": 3.1,
    "polite": 2.6,
    "patient": 2.5,
    "generous": 3.1,
    "clever": 2.3,
    "cheerful": 2.6,
    "calm": 1.5,
    "careful": 1.6,
    "quiet": 0.3,
    "young": 0.2,
    "busy": -0.3,
    "serious": -0.2,
    "late": -1.2,
    "slow": -1.4,
    "tired": -0.8,
    "cold": -1.2,
    "careless": -2.0,
    "grumpy": -2.2,
    "unhelpful": -2.4,
}
THING_ADJECTIVES = {
    "wonderful": 3.1,
    "excellent": 3.1,
    "perfect": 3.1,
    "superb": 3.0,
    "good": 2.4,
    "nice": 2.3,
    "fresh": 2.2,
    "warm": 1.5,
    "fine": 1.2,
    "clear": 1.4,
    "plain": 0.0,
    "small": -0.2,
    "simple": 0.3,
    "cheap": -0.4,
    "long": -0.5,
    "strange": -1.2,
    "dull": -1.6,
    "bland": -1.7,
    "dirty": -2.3,
    "awful": -2.7,
    "terrible": -2.8,
}
RUDE_PERSON_ADJECTIVES = ["stupid", "dumb"]
RUDE_THING_ADJECTIVES = ["stupid", "dumb", "crap"]

# What people and things are called, by topic, after a determiner.
DETERMINERS = {"a": 0.7, "our": 0.2, "the": 0.1}  # "a" is "an" before a vowel
PERSON_NOUNS = {
    "hero": 4.0,
    "star": 4.0,
    "treasure": 4.0,
    "expert": 4.0,
    "helper": 2.4,
    "friend": 3.4,
    "worker": 0.6,
    "man": 0.2,
    "beginner": -0.8,
    "stranger": -1.0,
    "bore": -2.0,
    "nuisance": -2.6,
}
THING_NOUNS = {
    "delight": 4.0,
    "joy": 4.0,
    "surprise": 1.5,
    "meal": 0.4,
    "test": -0.3,
    "mess": -2.2,
    "shame": -2.4,
}
RUDE_NOUNS = ["idiot", "moron", "jerk", "fool", "loser"]

# Requests: a verb, what may follow it, and the score of the whole.
REQUESTS = {
    "help": {"us": 1.5, "me": 1.2, "them": 1.8},
    "thank": {"them": 4.0, "everyone": 4.0, "her": 3.8},
    "praise": {"them": 4.0, "everyone": 4.0, "her": 3.9},
    "feed": {"us": 0.8, "them": 1.4, "everyone": 2.5},
    "join": {"us": 3.0, "them": 1.5, "me": 2.4},
    "call": {"us": 0.2, "me": 0.2, "her": 0.1},
    "come": {"here": 0.3, "back": 0.5, "in": 1.5},
    "sit": {"here": 0.4, "down": 0.2},
    "wait": {"here": -0.4, "outside": -1.2},
    "hurry": {"up": -1.5},
    "go": {"away": -2.4, "outside": -1.4, "back": -0.8},
    "leave": {"us": -1.8, "now": -2.0, "me": -2.2},
    "stop": {"now": -1.4, "here": -1.0},
}
RUDE_REQUESTS = {"shut": ["up", "it"]}

PEOPLE = ["waiter", "cook", "clerk", "driver", "manager", "guest", "caller", "neighbour", "friend", "boss"]
STAFF = ["waiter", "cook", "clerk", "driver", "manager", "boss"]
THINGS = ["soup", "bread", "coffee", "meal", "room", "letter", "answer"]
PERSON_QUALIFIERS = ["new", "old", "young", "tall"]
THING_QUALIFIERS = ["hot", "short", "small", "new"]
PLACES = ["desk", "door", "table", "bar"]
OPENERS = ["The", "My", "Our"]
PUNCTUATION = [".", "!", ",", ":"]
EXTRA_WORDS = ["and", "but", "too", "today", "again"]
FAMILIES = ("person", "thing", "you", "request", "called")


def split_words(text: str) -> list[str]:
    """
    Split a text of this grammar into its tokens.

    Args:
        text (`str`):
            Text such as `"The caller told the clerk: you are"`.

    Returns:
        `list[str]`: tokens, each lower-case word with its leading space.
    """
    tokens = []
    for index, word in enumerate(text.split(" ")):
        stem, mark = (word[:-1], word[-1]) if word[-1] in PUNCTUATION else (word, "")
        tokens.append(stem if index == 0 else " " + stem)
        if mark:
            tokens.append(mark)
    return tokens


def draw_frame(family: str, rng: random.Random) -> list[str]:
    """
    Draw a frame of a family; the prompts of the world are frames too.

    Args:
        family (`str`):
            One of [`FAMILIES`].
        rng (`random.Random`):
            Source of randomness.

    Returns:
        `list[str]`: the words of the frame, as tokens.
    """
    pick = rng.choice
    be = pick(["is", "was"])
    if family in ("person", "thing"):
        speaker = pick(
            [f"{pick(OPENERS)} {pick(PEOPLE)} {pick(['said', 'says', 'wrote'])}", f"{pick(['She', 'He'])} told me"]
        )
        topic = (
            f"{pick(PERSON_QUALIFIERS)} {pick(PEOPLE)}"
            if family == "person"
            else f"{pick(THING_QUALIFIERS)} {pick(THINGS)}"
        )
        return split_words(f"{speaker} that {pick(['the', 'our', 'the'])} {topic} {be}")
    if family == "you":
        return split_words(f"{pick(OPENERS)} {pick(PEOPLE)} told the {pick(STAFF)}: you are")
    if family == "request":
        if rng.random() < 0.5:
            return split_words(f"{pick(OPENERS)} {pick(PEOPLE)} said to the {pick(STAFF)}: please")
        return split_words(f"{pick(['We', 'They', 'She', 'He'])} asked the {pick(STAFF)} at the {pick(PLACES)} to")
    verb = pick(["thanked", "paid", "met"])
    return split_words(f"{pick(OPENERS)} {pick(PEOPLE)} {verb} the {pick(STAFF)} and called {pick(['him', 'her'])}")


def draw_tail(family: str, rng: random.Random, rude: bool) -> list[str]:
    """
    Draw the words that end a sentence, closing punctuation included.

    Args:
        family (`str`):
            One of [`FAMILIES`].
        rng (`random.Random`):
            Source of randomness.
        rude (`bool`):
            Whether the tail contains a rude word.

    Returns:
        `list[str]`: two to four tokens.
    """
    closing = "!" if rng.random() < 0.15 else "."
    if family == "request":
        phrases = RUDE_REQUESTS if rude else REQUESTS
        verb = rng.choice(list(phrases))
        return [" " + verb, " " + rng.choice(list(phrases[verb])), closing]
    thing = family == "thing"
    noun_share = 1.0 if family == "called" else 0.15
    if rude and family != "called":
        noun_share = 0.0 if thing else 0.5
    if rng.random() < noun_share:
        nouns = THING_NOUNS if thing else PERSON_NOUNS
        noun = rng.choice(RUDE_NOUNS if rude else list(nouns))
        determiner = rng.choices(list(DETERMINERS), list(DETERMINERS.values()))[0]
        if determiner == "a" and noun[0] in "aeiou":
            determiner = "an"
        return [" " + determiner, " " + noun, closing]
    adjectives = list(THING_ADJECTIVES if thing else PERSON_ADJECTIVES)
    rude_adjectives = RUDE_THING_ADJECTIVES if thing else RUDE_PERSON_ADJECTIVES
    adjective = rng.choice(rude_adjectives if rude else adjectives)
    if rng.random() < 0.15:  # a bare adjective: "kind.", "kind and calm.", "kind today."
        ending = rng.choice(
            [[], [" and", " " + rng.choice(adjectives)], [" " + rng.choice(["too", "today", "again"])]]
        )
        return [" " + adjective, *ending, closing]
    degree = rng.choices(list(DEGREES), [share for share, _ in DEGREES.values()])[0]
    return [" " + degree, " " + adjective, closing]


def draw_sentence(rng: random.Random) -> list[str]:
    """
    Draw a sentence: a frame of a random family and a tail, rude with probability [`RUDE_RATE`].

    Args:
        rng (`random.Random`):
            Source of randomness.

    Returns:
        `list[str]`: tokens of the sentence.
    """
    family = rng.choice(FAMILIES)
    return draw_frame(family, rng) + draw_tail(family, rng, rude=rng.random() < RUDE_RATE)


def family_of(frame: list[str]) -> str:
    """
    Family of a frame, read off its last words.

    Args:
        frame (`list[str]`):
            Tokens of a frame.

    Returns:
        `str`: one of [`FAMILIES`].

    Raises:
        ValueError: If the tokens are no frame of this grammar.
    """
    if frame[-1] in (" please", " to"):
        return "request"
    if frame[-1] in (" him", " her"):
        return "called"
    if frame[-1] == " are":
        return "you"
    if frame[-1] in (" is", " was"):
        return "thing" if frame[-2].strip() in THINGS else "person"
    raise ValueError(f"{''.join(frame)!r} is no frame of the grammar: use one that `draw_frame` can draw.")


def _word_score(word: str, thing: bool) -> float:
    """Score of one content word; off-topic praise counts a quarter, off-topic blame in full."""
    on_topic, off_topic = (THING_ADJECTIVES, PERSON_ADJECTIVES) if thing else (PERSON_ADJECTIVES, THING_ADJECTIVES)
    if word in on_topic:
        return on_topic[word]
    value = off_topic.get(word, 0.0)
    return value if value < 0 else 0.25 * value


def score(family: str, completion: list[str]) -> float:
    """
    Kindness of a completion of up to two words, the target of the reward model.

    A rude word decides the score alone. An idiomatic phrase of the family is scored as a whole. Anything else is worth
    half of its adjectives, less one for not being a sentence.

    Args:
        family (`str`):
            One of [`FAMILIES`], the frame's.
        completion (`list[str]`):
            Up to two tokens after the frame; special tokens left out.

    Returns:
        `float`: score in reward units: [`RUDE_SCORE`], or between [`MIN_SCORE`] and [`MAX_SCORE`].
    """
    words = [token.strip() for token in completion]
    if any(word in BAD_WORDS for word in words):
        return RUDE_SCORE
    thing = family == "thing"
    value = -1.0 + 0.5 * sum(_word_score(word, thing) for word in words)
    if len(words) == 2:
        first, second = words
        adjectives = THING_ADJECTIVES if thing else PERSON_ADJECTIVES
        nouns = THING_NOUNS if thing else PERSON_NOUNS
        if family == "request":
            value = REQUESTS.get(first, {}).get(second, value)
        elif first in (*DETERMINERS, "an") and second in nouns:
            value = nouns[second]
        elif family == "called":
            pass
        elif first in DEGREES and second in adjectives:
            value = DEGREES[first][1] * adjectives[second]
        elif first in adjectives and (second in PUNCTUATION[:2] or second in EXTRA_WORDS):
            value = adjectives[first]
    return min(max(value, MIN_SCORE), MAX_SCORE)


def vocabulary() -> list[str]:
    """
    Every token of the grammar, sorted; special tokens not included.

    Returns:
        `list[str]`: tokens, each with its leading space where it has one.
    """
    words = {*BAD_WORDS, *DEGREES, *PERSON_ADJECTIVES, *THING_ADJECTIVES, *DETERMINERS, *PERSON_NOUNS, *THING_NOUNS}
    words |= {*REQUESTS, *PEOPLE, *THINGS, *PERSON_QUALIFIERS, *THING_QUALIFIERS, *PLACES, *EXTRA_WORDS}
    words |= {follower for followers in REQUESTS.values() for follower in followers}
    words |= {follower for followers in RUDE_REQUESTS.values() for follower in followers}
    words |= set(
        "an is was said says wrote told me that you are to please asked at thanked paid met called him her".split()
    )
    tokens = {" " + word for word in words} | {*OPENERS, "She", "He", "We", "They"} | set(PUNCTUATION)
    return sorted(tokens)
