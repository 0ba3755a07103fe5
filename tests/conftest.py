"""Tiny worlds for the trainer tests: real architectures built from configs, word-level tokenizers, no network."""

import contextlib
import gc
import importlib.util
import os
import re
import sys
from pathlib import Path
from unittest import mock


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Whether trainers of the tests train on CPU, which they do wherever they run unless `--accelerator` is given. It has to be
# known before anything looks for devices, hence before pytest reads its options; the environment tells pytest-xdist's
# processes, and those that tests launch find neither and stay on CPU.
_ASKED = "TRL_REPULSE_TEST_ACCELERATOR"
USE_CPU = os.environ.pop(_ASKED, None) is None and "--accelerator" not in sys.argv
if USE_CPU:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import huggingface_hub.constants
import pytest
import torch
import transformers.utils.hub
import trl.trainer.utils
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from .hub_server import HubServer


sys.path.append(str(Path(__file__).parents[1] / "examples"))  # where scripts find `worlds`


torch.set_num_threads(1)


class PlainLogProbs:
    """TRL 1.15's kernel in plain torch: its own needs Triton, hence an accelerator."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, chunk_size, softcap, scale, outputs):
        logits = torch.nn.functional.linear(hidden, weight.to(hidden.dtype), bias).float() * scale
        logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
        log_p = logits.log_softmax(dim=-1)
        found = {
            "entropy": -(log_p.exp() * log_p).sum(dim=-1),
            "log_sum_sq_probs": (2 * log_p).logsumexp(dim=-1),
            "mean_logits": logits.mean(dim=-1),
            "is_top1": logits.argmax(dim=-1) == labels,
        }
        chosen = log_p.gather(-1, labels[:, None])[:, 0]
        return chosen, *(value if name in outputs else None for name, value in found.items())


if USE_CPU and getattr(trl.trainer.utils, "_ChunkedLogProbFunction", True) is None:
    trl.trainer.utils._ChunkedLogProbFunction = PlainLogProbs

# Fields of a short run, on the CPU as all others, that leaves nothing behind but its log
QUIET = {"use_cpu": USE_CPU, "bf16": False, "gradient_checkpointing": False, "logging_steps": 1}
QUIET |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}

DEVICE = torch.device("cpu") if USE_CPU else torch.accelerator.current_accelerator() or torch.device("cpu")
about_the_cpu = pytest.mark.skipif(not USE_CPU, reason="is about the CPU")


def also_thorough(*values):
    """Parameters that repeat what another value of theirs shows, so that they have the marker `thorough`."""
    return [pytest.param(value, marks=pytest.mark.thorough) for value in values]


WORDS = ["the", "cat", "dog", "sat", "ran", "ate", "fish", "bad"]
BAD = 18  # " bad"


# What DeepSpeed and bitsandbytes say where they are installed, once Accelerate and PEFT import them
_OTHERS = re.compile(r"\[[\d-]+ [\d:,]+\] \[[A-Z]+\] \[|Failed to load CPU gemm_4bit_forward ")


def without_others(text: str) -> str:
    """What a process wrote, but for the lines of DeepSpeed and bitsandbytes."""
    return "".join(line for line in text.splitlines(keepends=True) if not _OTHERS.match(line))


def pytest_addoption(parser):
    parser.addoption(
        "--accelerator", action="store_true", help="run trainers on the machine's accelerator, not on CPU"
    )


def pytest_configure(config):
    if not config.getoption("--accelerator"):
        return
    if USE_CPU:
        raise pytest.UsageError("--accelerator has to be on the command line itself: devices are hidden by now")
    if not torch.accelerator.is_available():
        raise pytest.UsageError(
            "--accelerator: torch finds no accelerator on this machine; leave it out to run on CPU"
        )
    if getattr(config.option, "numprocesses", None):
        os.environ[_ASKED] = "1"


def pytest_collection_finish(session):
    """What was imported is no garbage: `Trainer.train` collects first, which took a third of a short run's time."""
    gc.collect()
    gc.freeze()


def build_accelerator():
    """Accelerate's, on the device of the tests, in float32."""
    AcceleratorState._reset_state(reset_partial_state=True)  # else an earlier test's device and precision would stay
    return Accelerator(cpu=USE_CPU, mixed_precision="no")


def build_tokenizer(words: list[str] = WORDS, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Word-level tokenizer whose tokens carry their leading space, so that texts concatenate as tokens do."""
    tokens = ["<pad>", "<eos>", "<unk>", *words, *(f"Ġ{word}" for word in words)]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )


def build_model(architecture: str, vocab_size: int, seed: int = 0):
    """A random causal language model of the given architecture, wide awake (large initial weights)."""
    set_seed(seed)
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    if architecture == "gpt2":
        config = GPT2Config(
            vocab_size=vocab_size, n_embd=16, n_layer=2, n_head=2, n_positions=32, initializer_range=0.3, **special
        )
        return GPT2LMHeadModel(config)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        initializer_range=0.3,
        **special,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(params=["gpt2", "llama"])
def architecture(request):
    return request.param


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory, tokenizer):
    """Folders of saved tiny models with their tokenizer, by architecture."""
    folders = {}
    for name in ("gpt2", "llama"):
        folder = tmp_path_factory.mktemp(name)
        build_model(name, len(tokenizer)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders[name] = str(folder)
    return folders


@pytest.fixture(scope="session")
def prompts():
    """Prompts of unequal length: left padding matters."""
    return Dataset.from_dict({"prompt": ["the cat", "the dog ran the cat ate", "fish", "the fish sat bad"]})


def word_reward(completions, **kwargs):
    """Reward of a text completion: fish +1, cat +0.3, bad −3, summed over its words."""
    values = {"fish": 1.0, "cat": 0.3, "bad": -3.0}
    return [sum(values.get(word, 0.0) for word in completion.split()) for completion in completions]


def silent(completions, **kwargs):
    return [0.0 for _ in completions]


@pytest.fixture(scope="session")
def reward():
    return word_reward


@pytest.fixture
def nothing_loaded(monkeypatch):
    """No model may be loaded."""
    target = "transformers.PreTrainedModel.from_pretrained"
    monkeypatch.setattr(target, lambda *_, **__: pytest.fail("a model is loaded"))


@pytest.fixture(params=["no reader", "ascii"])
def poor_stdout(request):
    """A context in which Python's standard output is a pipe whose reader has left, or in a locale with few letters."""

    @contextlib.contextmanager
    def replaced():  # in the test itself: pytest's capture sets it anew before each
        reader, writer = os.pipe()
        stream = open(writer, "w", buffering=1, encoding="ascii" if request.param == "ascii" else "utf-8")
        if request.param == "no reader":
            os.close(reader)
        with mock.patch.object(sys, "stdout", stream), mock.patch.object(sys, "__stdout__", stream):
            yield
        with contextlib.suppress(BrokenPipeError):
            stream.close()
        if request.param == "ascii":
            os.close(reader)

    return replaced


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the Hub, which this process alone is sent to."""
    server = HubServer()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    assert not server.refused  # nothing was sent that the stand-in does not understand
    server.shutdown()
    server.server_close()


def load_script(path, name):
    """The module of a script, under a name by which dataclasses and worker processes find it."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_trainer(trainer_cls, model, reward_funcs, dataset, output_dir, extra=None, **kwargs):
    """A trainer of a tiny world; `extra` are arguments of the trainer, `kwargs` of its configuration."""
    from trl_repulse.configs import NegativeTermConfig

    settings = {"output_dir": str(output_dir), "max_steps": 2, "beta": 0.0, **QUIET}
    settings |= {"per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 2}
    settings |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    if issubclass(trainer_cls._config_cls, NegativeTermConfig):
        settings |= {"proposal": "learned", "potential": "tilted", "target_dist_beta": -2.0}
        settings |= {"alpha": 1.0, "alpha_normalization": "samples"}
    args = trainer_cls._config_cls(**(settings | kwargs))
    return trainer_cls(model=model, reward_funcs=reward_funcs, args=args, train_dataset=dataset, **(extra or {}))


@pytest.fixture
def make(tmp_path, model_dirs, prompts, reward):
    """Builds a trainer as `build_trainer` does, RePULSe's by default, on the model of an architecture."""
    from trl_repulse import RePULSeTrainer

    def make(trainer_cls=RePULSeTrainer, model="gpt2", reward_funcs=reward, dataset=prompts, extra=None, **kwargs):
        model = model_dirs.get(model, model) if isinstance(model, str) else model
        output_dir = kwargs.pop("output_dir", tmp_path / "out")
        return build_trainer(trainer_cls, model, reward_funcs, dataset, output_dir, extra, **kwargs)

    return make


@pytest.fixture
def update(tmp_path, tokenizer):
    """One update on recorded completions: the trainer, its models by name, the reference, and all gradients."""
    from . import recorded

    def update(*args, **kwargs):
        trainer, models, reference = recorded.prepare(tmp_path, tokenizer, *args, **kwargs)
        return trainer, models, reference, recorded.gradients(trainer, models)

    return update


@pytest.fixture
def evaluator(tokenizer, prompts, reward):
    """Exact evaluation of the tiny models; a completion is bad if it has the token `BAD`."""
    from examples.worlds.exact import ExactEvaluator

    return ExactEvaluator(tokenizer, prompts["prompt"], lambda texts: torch.tensor(reward(texts)), [BAD], 2)


def same_parameters(one, other):
    """Bit for bit, wherever they are."""
    return all(torch.equal(p.cpu(), q.cpu()) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def assert_same_logs(one, other, rel=1e-3, absolute=2e-5, ignored=()):
    """Of two trainers, whatever is not about time or `ignored`."""
    ignored = ("time", "runtime", "per_second", "flos", *ignored)
    for ours, theirs in zip(one.state.log_history, other.state.log_history, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours:
            if ours[key] is not None and not any(word in key for word in ignored):
                assert ours[key] == pytest.approx(theirs[key], rel=rel, abs=absolute), key


@pytest.fixture
def launched(monkeypatch):
    """What `accelerate launch` is asked for by a training command, in place of launching."""
    asked = []
    monkeypatch.setattr("trl_repulse.cli.train.launch_command", asked.append)
    return asked
