"""Rows of a file are read as they are: no row changes what the chat template makes of another."""

import json
import warnings

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, IterableDataset, concatenate_datasets, load_from_disk
from transformers import GPT2Config, GPT2LMHeadModel
from trl.trainer.utils import remove_none_values

from trl_repulse import PPOTrainer, ReinforceTrainer
from trl_repulse.cli.arguments import ARGUMENTS as METHODS
from trl_repulse.cli.main import main
from trl_repulse.cli.methods import train
from trl_repulse.data import load_prompts
from trl_repulse.data._checks import ALWAYS_PASSED, as_dataset, check_rows
from trl_repulse.data._prompts import as_templates_read
from trl_repulse.evaluation.callback import BeforeAfterCallback
from trl_repulse.evaluation.records import load_samples
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions

from ..conftest import also_thorough, build_model, build_tokenizer


ARGUMENTS = [
    *({"x": 1}, {"y": "a"}, {}, {"b": 1, "a": 2}, {"a": 2.5, "b": 1}, {"x": 1.0}, {"x": None}),
    *({"x": {"deep": [1, 2.5, {"k": []}]}}, {"x": {"other": "é"}}),
    *({"x": 0.573}, {"x": 0.1234567890123456}, {"x": 2**70}),
]

COMMANDS = ["repulse", "grpo", "evaluate", "attacks", "rare-events"]


def conversation(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "tool_calls": [call]},
        {"content": "fish", "role": "tool", "name": "f"},
    ]


PROMPTS = [conversation(arguments) for arguments in ARGUMENTS]


@pytest.fixture
def writer():
    """Its template writes all of each message, in the order of its keys."""
    return build_tokenizer(chat_template="{% for m in messages %}{{ m | tojson }}{% endfor %}")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": each, "about": each[1]}) for each in PROMPTS))
    return path


def long_model(tokenizer):
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 256, "eos_token_id": 1, "bos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes))


def rendered(tokenizer, prompts):
    return [tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True) for prompt in prompts]


@pytest.mark.parametrize(
    "change",
    [
        lambda rows, _: rows,
        lambda rows, _: rows.filter(lambda row: True),
        lambda rows, _: rows.map(lambda row: {"more": 1}),
        lambda rows, _: rows.to_iterable_dataset(),
        lambda rows, _: rows.to_iterable_dataset().map(lambda batch: batch, batched=True, batch_size=4),
        lambda rows, _: rows.repeat(2).select(range(len(PROMPTS))),
        lambda rows, folder: rows.save_to_disk(folder / "saved") or load_from_disk(folder / "saved"),
        lambda rows, _: concatenate_datasets([rows.select(range(3)), rows.select(range(3, len(PROMPTS)))]),
    ],
    ids=["as it is", "filter", "map", "stream", "mapped stream", "repeat", "disk", "concatenated"],
)
def test_each_row_is_rendered_as_it_is_alone(path, tmp_path, writer, change):
    found = list(change(load_prompts(path), tmp_path))
    assert rendered(writer, [row["prompt"] for row in found]) == rendered(writer, PROMPTS)
    assert json.dumps([row["about"] for row in found]) == json.dumps([each[1] for each in PROMPTS])


@pytest.mark.parametrize("values", [[2.5, True], [2.5, 1], [1.0, 2]])
def test_numbers_and_truth_values_stay_what_they_are(tmp_path, values):
    (tmp_path / "p.json").write_text(json.dumps([{"prompt": "a", "value": value} for value in values]))
    assert repr(load_prompts(tmp_path / "p.json")["value"][:]) == repr(values)


def test_lists_of_prompts(writer):
    assert rendered(writer, as_dataset(PROMPTS)["prompt"]) == rendered(writer, PROMPTS)
    assert rendered(writer, as_dataset(iter(PROMPTS))[:]["prompt"]) == rendered(writer, PROMPTS)


def test_rows_that_arrow_keeps_stay_arrows(tmp_path):
    """Types that other data sets have too, with which they can be joined."""
    rows = [{"prompt": [{"role": "user", "content": "a"}], "tags": ["a"], "n": 1}] * 2
    (tmp_path / "p.json").write_text(json.dumps(rows))
    assert load_prompts(tmp_path / "p.json").features == Dataset.from_list(rows).features


@pytest.mark.trainer
@pytest.mark.parametrize("streaming", [False, True])
def test_training_and_its_table(make, path, writer, streaming):
    seen = []

    def reward(prompts, completions, about, **_):
        seen.extend(zip(prompts, about, strict=True))
        return [float(i) for i in range(len(prompts))]

    rows = load_prompts(path, streaming=streaming)
    trainer = make(ReinforceTrainer, long_model(writer), reward, rows, {"processing_class": writer}, max_steps=3)
    table = BeforeAfterCallback(trainer, rows, len(PROMPTS))
    assert rendered(writer, table.dataset["prompt"]) == rendered(writer, PROMPTS)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*calls of tools with `None`")  # which one row has of itself
        trainer.train()
    known = {(json.dumps(prompt), json.dumps(prompt[1])) for prompt in PROMPTS}
    assert {(json.dumps(prompt), json.dumps(about)) for prompt, about in seen} == known


def flags_of(command, model, path, reward, folder):
    """A short run of a command."""
    prompts, judge = ["--prompts", str(path)], ["--reward_type", reward, "--max_completion_length", "1"]
    if command in METHODS:
        flags = ["--max_steps", "1", "--disable_tqdm", "true", "--use_cpu", "true", "--bf16", "false"]
        flags += ["--model_name_or_path", model, "--dataset_name", str(path), "--output_dir", str(folder)]
        flags += ["--per_device_train_batch_size", "24", "--num_generations", "2", "--report_to", "none", *judge]
        threshold = [] if command in ("reinforce", "grpo", "ppo") else ["--bad_reward_threshold", "0.5"]
        return [*flags, *threshold]
    named = {"rare-events": [command, model], "suggest": [command, "--model", model]}
    more = {
        "evaluate": ["--num_samples", "2"],
        "attacks": ["--num_samples", "2", "--threshold", "1", "--prefill", "fish", "--augment"],
        "rare-events": ["--num_samples", "48", "--num_proposal_samples", "0", "--threshold", "1"],
        "suggest": ["--num_samples", "60", "--minutes", "2", "--output", str(folder)],
    }
    return [*named.get(command, [command, str(folder), "--model", model]), *prompts, *judge, *more[command]]


@pytest.mark.trainer
@pytest.mark.parametrize("command", [*COMMANDS, *also_thorough("suggest", "ppo")])
def test_commands(tmp_path, writer, command):
    """Each passes all rows to the reward as they are. With TRL's own trainer too, which looks up the content of a message that has none."""
    long_model(writer).save_pretrained(tmp_path / "model")
    writer.save_pretrained(tmp_path / "model")
    (tmp_path / "mine.py").write_text(
        "import json, pathlib\n\n"
        "def reward(prompts, completions, about, number, behavior=None, **_):\n"
        "    with (pathlib.Path(__file__).parent / 'seen.jsonl').open('a') as file:\n"
        "        file.writelines(json.dumps(row) + '\\n' for row in zip(prompts, about, number))\n"
        "    return [float(i) for i in range(len(prompts))]\n"
    )
    asked = [[*prompt, {"role": "user", "content": "the cat"}] for prompt in PROMPTS]
    rows = [{"prompt": each, "about": each[1], "number": i if i % 2 else i + 0.5} for i, each in enumerate(asked)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = flags_of(
        command,
        *(str(tmp_path / "model"), tmp_path / "prompts.jsonl", f"{tmp_path / 'mine.py'}:reward", tmp_path / "out"),
    )
    if command in METHODS:
        train(command, flags)
    else:
        assert main(flags) == 0
    seen = set((tmp_path / "seen.jsonl").read_text().splitlines())
    assert seen == {json.dumps([row["prompt"], row["about"], row["number"]]) for row in rows}
    if command == "attacks":
        for name, begin in (("prompt", ""), ("prefill", "fish")):
            table = load_samples(tmp_path / "out" / "attacks" / name).table
            assert table["prompt"].to_pylist()[::2] == [text + begin for text in rendered(writer, asked)]


def test_what_a_message_lacks_is_undefined_to_a_template():
    """As it is where the template is applied to the message itself, and unlike `None`."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = """{% for m in messages %}{{ m.content }}{{ m['content'] }}{{ 'content' in m }}\
{{ m.content is defined }}{{ m.get('content') }}{{ m | tojson }}{% endfor %}"""
    assert rendered(tokenizer, as_templates_read(PROMPTS)) == rendered(tokenizer, PROMPTS)
    filled = [[{"content": None, **message} for message in prompt] for prompt in PROMPTS]
    assert rendered(tokenizer, filled) != rendered(tokenizer, PROMPTS)


# What cannot be told from Arrow's rows


def test_what_arrow_has_filled_in_is_warned_of():
    merged = Dataset.from_list([{"prompt": prompt} for prompt in (conversation({"x": 1}), conversation({"y": 2}))])
    with pytest.warns(UserWarning, match="`prompts` has calls of tools with `None` .*remove_none_values") as found:
        as_dataset(merged)
    assert len(found) == 1
    stream = IterableDataset.from_generator(lambda: iter(merged))
    with pytest.warns(UserWarning, match="a batch of the data set has calls of tools with `None`"):
        check_rows(list(stream))
    with warnings.catch_warnings(action="error"):
        check_rows([merged.with_transform(remove_none_values)[0]])
        as_dataset(merged.select([0]).map(lambda row: {"prompt": row["prompt"][:1]}))


# Types of columns


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array([2**64 - 1, 1], pa.uint64()), [2**64 - 1, 1]),
        (pa.array(['{"a": 1}', '{"b": 2}'], pa.json_()), [{"a": 1}, {"b": 2}]),
        (pa.array(["x", "y"]).dictionary_encode(), ["x", "y"]),
    ],
    ids=["uint64", "json", "dictionary"],
)
def test_types_of_parquet(tmp_path, values, expected):
    pq.write_table(pa.table({"prompt": ["a", "b"], "c": values}), tmp_path / "p.parquet")
    assert load_prompts(tmp_path / "p.parquet")["c"][:] == expected


def test_maps_of_parquet(tmp_path):
    kind = pa.map_(pa.string(), pa.int64())
    for values in (pa.array([[("a", 1)]], kind), pa.array([{"m": [("a", 1)]}], pa.struct({"m": kind}))):
        pq.write_table(pa.table({"prompt": ["a"], "c": values}), tmp_path / "p.parquet")
        with pytest.raises(ValueError, match="has a type that data sets lack .*map<.*write a struct"):
            load_prompts(tmp_path / "p.parquet")


# Columns that reward functions could not get


@pytest.mark.parametrize("name", [*ALWAYS_PASSED, "environments", "self"])
def test_columns_with_names_that_are_taken(make, tmp_path, name):
    rows = [{"prompt": "the cat", name: "a"}] * 16
    message = f"has a column `{name}`, and reward functions get .*rename"
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=message):
        load_prompts(tmp_path / "p.jsonl")
    with pytest.raises(ValueError, match="`prompts` " + message):
        sample_completions(tmp_path / "out", "gpt2", Dataset.from_list(rows), lambda **_: [])
    for argument in ("train_dataset", "hard"):  # refused before a model is looked for
        given = {"dataset": Dataset.from_list(rows)} if argument == "train_dataset" else {}
        evals = {} if given else {"extra": {"eval_dataset": {"hard": Dataset.from_list(rows)}}}
        with pytest.raises(ValueError, match=f"`{argument}` {message}"):
            make(ReinforceTrainer, "no-model", **given, **evals)
    with pytest.raises(ValueError, match="The data set " + message):  # of a stream whose columns are not known before
        check_rows(rows)


def test_a_column_of_template_variables(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "chat_template_kwargs": {"thinking": true}}')
    with pytest.raises(ValueError, match="has a column `chat_template_kwargs`, which is not read; remove it"):
        load_prompts(tmp_path / "p.jsonl")


def test_the_prompts_may_be_in_a_column_of_a_taken_name(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompts": "a"}')
    assert load_prompts(tmp_path / "p.jsonl", column="prompts")["prompt"][:] == ["a"]


def test_a_column_named_completion_reaches_rewards_neither_in_training_nor_in_evaluation(make, tmp_path, tokenizer):
    columns = []

    def reward(completions, **given):
        columns.append(sorted(given))
        return [0.0] * len(completions)

    rows = Dataset.from_list([{"prompt": "the cat", "completion": "fish", "tag": 1}] * 16)
    make(ReinforceTrainer, reward_funcs=reward, dataset=rows, max_steps=1).train()
    model = build_model("gpt2", len(tokenizer))
    settings = SamplingSettings(num_samples=1, max_completion_length=2)
    sample_completions(tmp_path / "samples", model, rows, reward, settings, tokenizer=tokenizer)
    assert len(columns) > 1 and all("tag" in given and "completion" not in given for given in columns)


# Streams


@pytest.mark.trainer
@pytest.mark.parametrize("trainer_cls", [ReinforceTrainer, PPOTrainer])
def test_a_stream_of_fewer_rows_than_a_batch(make, trainer_cls):
    def trained(rows):
        stream = Dataset.from_list([{"prompt": "the cat"}] * rows).to_iterable_dataset()
        trainer = make(trainer_cls, dataset=stream, num_generations=4)
        trainer.train()
        return trainer.state.global_step

    with pytest.raises(ValueError, match="`train_dataset` has 3 prompts, but one batch of generations takes 4 .*repe"):
        trained(3)
    assert trained(4) == 2
