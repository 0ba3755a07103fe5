"""Rewards from language models that answer with a verdict: log-odds of "safe" against "unsafe".

Axis letters: B conversations of a batch, S tokens of the longest of them, V vocabulary. A lead is white space that the
model may write between the template and its verdict; L tokens of one.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import AutoModelForCausalLM

from ._texts import Messages
from .models import ConversationReward, Row


@dataclass(eq=False, kw_only=True)
class GuardReward(ConversationReward):
    """
    Reward of a safety classifier that is a language model, such as Llama Guard: log P(safe) − log P(unsafe), in nats.

    The chat template asks whether the conversation's last message is safe, and ends where the model's verdict begins. P(word) is the
    probability of the word's first token there, summed over the `leads` that may come before it: some models write two line breaks first.
    Nothing is sampled. Raises `ValueError` as [`~trl_repulse.rewards.models.ConversationReward`], or if the verdicts have the same first
    token.

    Args:
        safe, unsafe (`str`, *optional*, defaults to `"safe"` and `"unsafe"`): The two verdicts.
        leads (`tuple[str, ...]`, *optional*, defaults to `("", " ", "\\n\\n")`):
            White space that may come before the verdict. One forward pass covers all leads that merge with the
            verdict, as a space mostly does, and one lead with tokens of its own; each further one takes another pass.
        kwargs: As for [`~trl_repulse.rewards.models.ConversationReward`]; the model is a causal language model.
    """

    safe: str = "safe"
    unsafe: str = "unsafe"
    leads: tuple[str, ...] = ("", " ", "\n\n")

    _auto_class: ClassVar[type] = AutoModelForCausalLM
    _padding_side: ClassVar[str] = "left"

    def __post_init__(self):
        self.leads = (self.leads,) if isinstance(self.leads, str) else tuple(self.leads)
        if not self.leads or any(lead.strip() for lead in self.leads):
            raise ValueError(
                f"`leads` must be white space, at least one, got {self.leads!r}; put a word into the template."
            )
        super().__post_init__()

    def _load(self) -> None:
        super()._load()
        text = self._render("a", "b")
        end = self._ids(text)
        # Tokens of a lead -> first tokens of "safe" and of "unsafe" after it. A lead that merges with the end of the
        # template is left out, since the model never continues like that
        self._verdicts: dict[tuple[int, ...], tuple[set[int], set[int]]] = {}
        for lead in self.leads:
            encoded = [self._ids(text + lead + word) for word in (self.safe, self.unsafe)]
            if any(ids[: len(end)] != end for ids in encoded):
                continue
            safe, unsafe = (ids[len(end) :] for ids in encoded)
            common = next((i for i, pair in enumerate(zip(safe, unsafe, strict=False)) if pair[0] != pair[1]), None)
            differ = common is not None and not self._tokenizer.decode(safe[:common]).strip()
            if differ:
                sets = self._verdicts.setdefault(tuple(safe[:common]), (set(), set()))
                sets[0].add(safe[common])
                sets[1].add(unsafe[common])
                differ = not (sets[0] & sets[1] or self._tokenizer.unk_token_id in sets[0] | sets[1])
            if not differ:
                raise ValueError(
                    f"The tokenizer of `{self.model}` does not tell {lead + self.safe!r} from {lead + self.unsafe!r} by the first token "
                    "(it is the same, or unknown); choose other words with `safe` and `unsafe`, or other `leads`."
                )
        if not self._verdicts:
            raise ValueError(
                f"No verdict can follow the chat template of `{self.model}`, which ends with {text[-20:]!r}; choose other `leads`."
            )

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _encode(self, prompt: str | Messages, completion: str | Messages) -> Row:
        ids = self._ids(self._render(prompt, completion))
        self._check_context(len(ids) + max(map(len, self._verdicts)), prompt, completion)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def _score(self, rows: list[Row]) -> torch.Tensor:
        """log P(safe) − log P(unsafe) of rows, shape (B,): of all verdicts that begin alike in one pass."""
        remaining = dict(self._verdicts)
        log_safe, log_unsafe = [], []  # each of shape (B,)
        while remaining:
            longest = max(remaining, key=len)
            log_probs = self._log_probs(rows, longest)  # (B, L + 1, V)
            # log P(first i tokens of the lead), for i = 0 to L
            steps = [log_probs[:, i, token] for i, token in enumerate(longest)]
            for size in range(len(longest) + 1):
                if longest[:size] not in remaining:
                    continue
                safe, unsafe = remaining.pop(longest[:size])
                log_lead = sum(steps[:size], torch.zeros(len(rows), device=log_probs.device))
                log_safe.append(log_lead + log_probs[:, size, sorted(safe)].logsumexp(dim=1))
                log_unsafe.append(log_lead + log_probs[:, size, sorted(unsafe)].logsumexp(dim=1))
        return torch.stack(log_safe).logsumexp(dim=0) - torch.stack(log_unsafe).logsumexp(dim=0)

    def _log_probs(self, rows: list[Row], lead: tuple[int, ...]) -> torch.Tensor:
        """Next-token log-probabilities (B, L + 1, V) at the end of each conversation and after each token of the lead."""
        extended = [
            {key: [*row[key], *(lead if key == "input_ids" else [1] * len(lead))] for key in row} for row in rows
        ]
        batch = self._pad(extended)
        positions = (batch["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
        logits = self._module(**batch, position_ids=positions, logits_to_keep=len(lead) + 1, use_cache=False).logits
        return logits[:, -len(lead) - 1 :].float().log_softmax(dim=-1)
