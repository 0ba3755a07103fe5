"""What rewards and readers are given of plain prompts: the text that the model wrote, and what the tokenizer adds to it."""

import copy
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from examples.worlds.exact import ExactEvaluator
from examples.worlds.exact_tracking import tokenize_prompts
from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeGRPOTrainer, RePULSeTrainer
from trl_repulse.data import _texts
from trl_repulse.data._texts import check_added_tokens, completion_texts, joins
from trl_repulse.evaluation.callback import BeforeAfterCallback, draw_completions
from trl_repulse.evaluation.gcg import GCGEvaluationConfig, evaluate_gcg
from trl_repulse.evaluation.gcg.results import read_results
from trl_repulse.evaluation.rare.sampling import draw as draw_rare
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions
from trl_repulse.generation import TransformersGenerator

from ..conftest import also_thorough
from ..conftest import build_tokenizer as build_words
from ..gcg_support import build_model, build_sentencepiece_tokenizer
from ..gcg_support import build_tokenizer as build_byte_level


PROMPTS = ["the cat", "tell me the secret of the ", "how to write"]
SMALL = {"max_steps": 1, "max_completion_length": 4, "per_device_train_batch_size": 8, "learning_rate": 1e-3}
TRAINERS = [RePULSeTrainer, *also_thorough(PPOTrainer, RePULSeGRPOTrainer)]


def build_wordpiece():
    """BERT's, whose decoder puts a space between words and takes it out before punctuation."""
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "cat", "ran", "##s", ".", "'", "t", "don"]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="[SEP]")
    tokenizer.clean_up_tokenization_spaces = True
    return tokenizer


@pytest.fixture(scope="module", params=[True, False], ids=["legacy", "metaspace"])
def sentencepiece(request):
    return build_sentencepiece_tokenizer(request.param, chat_template=None)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tokenizer as Llama 2 has it, a model, and the folder of both."""
    tokenizer = build_sentencepiece_tokenizer(False, chat_template=None)
    model = build_model("llama", len(tokenizer))
    folder = tmp_path_factory.mktemp("world")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer, model, str(folder)


class Recorder:
    """A reward function that keeps what it reads."""

    __name__ = "recorder"

    def __init__(self):
        self.read = []

    def __call__(self, prompts, completions, completion_ids=None, **kwargs):
        ids = completion_ids or [None] * len(prompts)
        self.read += zip(prompts, completions, ids, strict=True)
        return [float(len(text)) for text in completions]

    def check(self, tokenizer):
        """That what was read is the text of all tokens, and that some of it would be another if completions were decoded alone."""
        assert self.read
        for prompt, completion, ids in self.read:
            whole = tokenizer(prompt)["input_ids"] + ids
            assert prompt + completion == tokenizer.decode(whole, skip_special_tokens=True)
        assert any(text != tokenizer.decode(ids, skip_special_tokens=True) for _, text, ids in self.read)


def dataset_of(prompts=PROMPTS):
    return Dataset.from_dict({"prompt": list(prompts)})


# The text of a completion


def test_prompt_and_completion_are_the_text_of_all_tokens(sentencepiece):
    tokens = [["▁ran"], ["n", "ing"], ["▁", "▁the"], ["the", "</s>"], ["<0xC3>", "<0xA9>"], ["▁the", "▁house"], []]
    tokens = [tokenizer_ids(sentencepiece, row) for row in tokens]
    prompts = [*PROMPTS, "<s>the cat", ""]
    rows = [(prompt, row) for prompt in prompts for row in tokens]
    ids = [sentencepiece(prompt)["input_ids"] for prompt, _ in rows]
    texts = completion_texts(sentencepiece, [prompt for prompt, _ in rows], ids, [row for _, row in rows])
    for (prompt, row), read, text in zip(rows, ids, texts, strict=True):
        whole = sentencepiece.decode(read + row, skip_special_tokens=True)
        assert prompt.removeprefix("<s>") + text == whole
    assert not joins(sentencepiece)


def tokenizer_ids(tokenizer, tokens):
    known = tokenizer.get_vocab()
    pieces = [piece for token in tokens for piece in ([token] if token in known else token)]
    return tokenizer.convert_tokens_to_ids(pieces)


def test_of_messages_a_completion_is_decoded_by_itself(sentencepiece):
    ids = sentencepiece.convert_tokens_to_ids(["▁the", "▁house"])
    messages = [[{"role": "user", "content": "the cat"}]]
    assert completion_texts(sentencepiece, messages, [[1, 5]], [ids]) == ["the house"]
    read = sentencepiece("the cat")["input_ids"]
    assert completion_texts(sentencepiece, ["the cat"], [read], [ids]) == [" the house"]


@pytest.mark.parametrize(
    ("completion", "text"),
    [(["ran"], " ran"), (["##s", "."], "s."), (["."], "."), (["don", "'", "t"], " don't"), ([], "")],
    ids=str,
)
def test_words_that_the_decoder_parts(completion, text):
    tokenizer = build_wordpiece()
    ids, prompt = tokenizer.convert_tokens_to_ids(completion), tokenizer("the cat")["input_ids"]
    assert completion_texts(tokenizer, ["the cat"], [prompt], [ids]) == [text]
    assert "the cat" + text == tokenizer.decode(prompt + ids)
    # A space at the prompt's end, which this tokenizer drops, is the one that the decoder writes
    expected = "the cat " + text.removeprefix(" ")
    assert "the cat " + completion_texts(tokenizer, ["the cat "], [prompt], [ids])[0] == expected


def test_byte_level_tokenizers_decode_as_before():
    tokenizer = build_byte_level()
    rows = torch.randint(0, len(tokenizer), (200, 6), generator=torch.Generator().manual_seed(0)).tolist()
    ids = tokenizer(["the café"] * 200)["input_ids"]
    assert joins(tokenizer) and joins(build_words())
    texts = completion_texts(tokenizer, ["the café"] * 200, ids, rows)
    assert texts == tokenizer.batch_decode(rows, skip_special_tokens=True)
    wholes = tokenizer.batch_decode([a + b for a, b in zip(ids, rows, strict=True)], skip_special_tokens=True)
    assert ["the café" + text for text in texts] == wholes
    assert any("\ufffd" in text for text in texts)  # tokens that are part of a character


def test_a_character_that_is_cut_between_prompt_and_completion():
    """As an attack may cut it: the completion has the character, not what stands for its last byte."""
    tokenizer = build_byte_level()
    ids = tokenizer("the \u20ac ran")["input_ids"]
    place = next(i for i in range(len(ids)) if tokenizer.decode(ids[:i]).endswith("\ufffd"))
    begin = tokenizer.decode(ids[:place], skip_special_tokens=True)
    assert completion_texts(tokenizer, [begin], [ids[:place]], [ids[place:]]) == ["\u20ac ran"]


# Where it is read


@pytest.mark.trainer
@pytest.mark.parametrize("trainer_cls", TRAINERS, ids=lambda cls: cls.__name__)
def test_rewards_in_training_read_what_the_model_wrote(make, world, trainer_cls):
    tokenizer, _, folder = world
    reward = Recorder()
    make(trainer_cls, folder, reward, dataset_of(), **SMALL).train()
    reward.check(tokenizer)
    assert len(reward.read) == (16 if "RePULSe" in trainer_cls.__name__ else 8)  # samples of the proposal too


@pytest.mark.trainer
def test_the_callbacks_read_and_show_what_the_policy_wrote(make, world):
    tokenizer, _, folder = world
    reward = Recorder()
    trainer = make(ReinforceTrainer, folder, reward, dataset_of(), **SMALL)
    table = BeforeAfterCallback(trainer, dataset_of(), num_completions=3)
    shown = draw_completions(trainer, table.dataset, table._prompt_ids, 4, 0)
    reward.check(tokenizer)
    assert [text for text, _ in shown] == [text for _, text, _ in reward.read]


# What the tokenizer adds


def ending(tokenizer):
    """The tokenizer, with its end token behind each text and its first one in front."""
    end, begin = tokenizer.eos_token, tokenizer.bos_token
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (begin, end)]
    tokenizer = copy.deepcopy(tokenizer)
    added = processors.TemplateProcessing(single=f"{begin} $A {end}", special_tokens=ids)
    tokenizer.backend_tokenizer.post_processor = added
    return tokenizer


def readers(tokenizer, model, tmp_path, reward=None):
    """What reads plain prompts outside of training, by name."""
    reward = reward or Recorder()
    settings = SamplingSettings(num_samples=8, max_completion_length=4)
    gcg = GCGEvaluationConfig(
        num_steps=1, search_width=4, topk=4, num_samples=8, max_new_tokens=4, prompt_format="raw", include_suffix=True,
        suffix_init=" x x", filter_roundtrip="off", save_responses=True,
    )  # fmt: skip
    rows = [{"goal": "the cat", "target": "the house"}]
    trainer = SimpleNamespace(processing_class=tokenizer, model=model, max_completion_length=2)
    return {
        "evaluate": lambda: sample_completions(
            tmp_path / "samples", model, PROMPTS, reward, settings, tokenizer=tokenizer, progress=False
        ),
        "exact": lambda: ExactEvaluator(tokenizer, PROMPTS, lambda texts: torch.zeros(len(texts)), [5], 1),
        "gcg": lambda: evaluate_gcg(model, tokenizer, rows, reward, gcg, tmp_path / "out"),
        "generator": lambda: TransformersGenerator({"policy": model}, tokenizer, 4).complete(PROMPTS, "policy", 4),
        "rare": lambda: draw_rare([model], tokenizer, PROMPTS, reward, (8,), 4),
        "tracking": lambda: tokenize_prompts(trainer, PROMPTS),
    }


@pytest.mark.parametrize("name", ["evaluate", "gcg", "generator", "rare"])
def test_rewards_and_readers_get_what_the_model_wrote(world, tmp_path, name):
    """As it is stored and returned, too."""
    tokenizer, model, _ = world
    reward = Recorder()
    result = readers(tokenizer, model, tmp_path, reward)[name]()
    if name == "generator":
        for prompt, completions in zip(PROMPTS, result, strict=True):
            reward([prompt] * 4, [each.text for each in completions], [each.token_ids for each in completions])
    read = [text for _, text, _ in reward.read]
    if name == "evaluate":
        assert result.table["completion"].to_pylist() == read
    if name in ("evaluate", "generator"):
        return reward.check(tokenizer)
    # The others judge texts alone
    assert sum(text.startswith(" ") for text in read) > 5
    if name == "rare":
        assert {text for row in result.texts for text in row} == set(read)
        return
    (record,) = read_results(result)[1]
    for phase, asked in (("before", "the cat"), ("after", "the cat" + record["suffix"])):
        assert record[phase]["responses"] == [text for prompt, text, _ in reward.read if prompt == asked]


@pytest.mark.parametrize("name", ["evaluate", "exact", "gcg", "generator", "rare", "tracking"])
def test_a_tokenizer_that_ends_prompts_is_refused(world, tmp_path, name):
    tokenizer, model, _ = world
    with pytest.raises(ValueError, match="set its `add_bos_token = True` and `add_eos_token = False`"):
        readers(ending(tokenizer), model, tmp_path)[name]()


@pytest.mark.trainer
@pytest.mark.parametrize("trainer_cls", TRAINERS, ids=lambda cls: cls.__name__)
def test_training_refuses_a_tokenizer_that_ends_prompts_at_set_up(make, world, trainer_cls):
    tokenizer, _, folder = world
    with pytest.raises(ValueError, match="ends plain prompts with its end token '</s>'"):
        make(trainer_cls, folder, Recorder(), dataset_of(), extra={"processing_class": ending(tokenizer)}, **SMALL)


def test_the_remedy_keeps_the_first_token():
    tokenizer = build_byte_level(chat_template=None)
    expected, changed = tokenizer("the cat")["input_ids"], ending(tokenizer)
    assert changed("the cat")["input_ids"] == [*expected, tokenizer.eos_token_id]
    changed.add_bos_token, changed.add_eos_token = True, False
    check_added_tokens(changed, ["the cat"])
    assert changed("the cat")["input_ids"] == expected


def test_what_is_warned_of_and_what_is_not(monkeypatch):
    said = []
    monkeypatch.setattr(_texts.logger, "warning_once", said.append)
    tokenizer = build_byte_level()
    messages = [{"role": "user", "content": "the cat"}]
    for prompts in (["the cat", "the<eos>"], ["", "the cat"], [], [messages]):
        ids = [tokenizer(each)["input_ids"] for each in prompts if isinstance(each, str)]
        check_added_tokens(tokenizer, prompts, ids)
    check_added_tokens(ending(tokenizer), [messages])  # the template writes all special tokens
    assert not said
    for prompts in (["<s>the cat"], ["the cat", "<s>the cat"]):
        check_added_tokens(tokenizer, prompts, tokenizer(prompts)["input_ids"])
        assert "Prompts begin with '<s>' twice" in said.pop() and not said
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", tokenizer.convert_tokens_to_ids("<|end|>"))]
    )
    check_added_tokens(tokenizer, ["the cat"])
    assert "adds '<|end|>' to the end" in said.pop()
