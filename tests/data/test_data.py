"""Prompts from files: what is read, and what is refused."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from trl_repulse.data import drop_long_prompts, load_prompts
from trl_repulse.data import loading as data

from ..conftest import build_tokenizer


PLAIN = ["the cat, and the dog", "naïve “quotes”", "two\u2028lines\nhere"]
CHATS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
]


def write_rows(path, rows):
    """The rows as a file of the format that the suffix names."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    else:
        path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    return path


def write(path, prompts):
    return write_rows(path, [{"prompt": prompt, "tag": i} for i, prompt in enumerate(prompts)])


def test_rows_of_commas_are_no_rows(tmp_path):
    """As spreadsheets add them; a row that has anything is one."""
    path = tmp_path / "prompts.csv"
    path.write_text("prompt,tag\na,1\n,\nb,\n,\n")
    assert load_prompts(path)["prompt"][:] == ["a", "b"]


@pytest.mark.parametrize(
    ("prompts", "suffix"),
    [
        *((PLAIN, suffix) for suffix in (".jsonl", ".json", ".csv", ".parquet", ".JSONL")),
        *((CHATS, suffix) for suffix in (".jsonl", ".json", ".parquet")),
    ],
)
def test_formats(tmp_path, monkeypatch, prompts, suffix):
    """A path may begin with the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write(tmp_path / f"prompts{suffix}", prompts)
    for dataset in (load_prompts(path), load_prompts(f"~/{path.name}")):
        assert isinstance(dataset, Dataset) and dataset["prompt"][:] == prompts
        assert [int(tag) for tag in dataset["tag"]] == [*range(len(prompts))]


REFUSED = {
    "empty.jsonl": ("", "is empty; give it at least one row"),
    "column.jsonl": ('{"question": "a", "tag": 1}\n', "no column `prompt`, only question, tag; .*load_prompts.column"),
    "column.csv": ("question\na\n", "no column `prompt`, only question; name the one .* `--prompt_column`"),
    "null.jsonl": ('{"prompt": "a"}\n{"prompt": null}\n', "Row 2 of .* has an empty `prompt`; fill it in or drop"),
    "blank.csv": ("prompt,tag\na,1\n ,2\n", "Row 2 of .* has an empty `prompt`"),
    "number.jsonl": ('{"prompt": 3}\n', "Row 1 of .* neither text nor a list of messages .* write it"),
    "types.jsonl": ('{"prompt": "a", "tag": 1}\n{"prompt": "b", "tag": "c"}\n', "mixes types .* give each column"),
    "large.jsonl": ('{"prompt": "a", "id": 100000000000000000000}\n', "more than 63 bits.* write numbers as text"),
    "surrogate.jsonl": ('{"prompt": "\\ud83d a"}\n', "half of a surrogate pair in a text; correct it"),
    "image.jsonl": ('{"prompt": "a", "image": "b.png"}\n', "has a column `image`, but only text"),
    "broken.jsonl": ('{"prompt": "a"}\n{"prompt": \n', "Line 2 of .* is not valid JSON .* write one object a line"),
    "strings.json": ('["a", "b"]', "Row 1 of .* is not an object; write each row as"),
    "fake.parquet": ("prompt", "cannot be read as parquet .* fix the file"),
    "bytes.jsonl": (b"\xff\xfe\x00", "Line 1 of .* is not UTF-8 text .*; save the file as UTF-8"),
    "prompts.txt": ("a\n", "has the suffix '.txt'; convert it to a .jsonl, .json, .csv or .parquet file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_files(tmp_path, name):
    text, message = REFUSED[name]
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message) as error:
        load_prompts(tmp_path / name)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.tsv", "./prompts", "/nowhere/prompts", "~/prompts"])
def test_missing_file(name, monkeypatch):
    monkeypatch.setattr(data, "load_dataset", lambda *args, **kwargs: pytest.fail("taken for a data set on the Hub"))
    with pytest.raises(ValueError, match="There is no file .* give the path of a .jsonl, .json, .csv or .parquet fil"):
        load_prompts(name)


def test_a_file_has_one_split(tmp_path):
    path = write(tmp_path / "prompts.jsonl", PLAIN)
    message = "one file with one split, 'train', and has no split 'test'; .* `--dataset_test_split`"
    with pytest.raises(ValueError, match=message):
        load_prompts(path, split="test")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_split_that_a_folder_lacks(tmp_path, streaming):
    """What it has is named, and each flag that may have named the other."""
    (tmp_path / "prompts").mkdir()
    write(tmp_path / "prompts" / "train.jsonl", PLAIN)
    with pytest.raises(ValueError, match=r"has no split 'test' \(.*\['train'\]\).*`--split` .*`--dataset_test_split`"):
        load_prompts(tmp_path / "prompts", split="test", streaming=streaming)


class TestHub:
    """What is asked of `datasets.load_dataset`, which is replaced: there is no network."""

    @pytest.fixture(autouse=True)
    def hub(self, monkeypatch):
        self.calls, self.answer = [], Dataset.from_dict({"prompt": PLAIN})

        def load_dataset(*args, **kwargs):
            self.calls.append((args, kwargs))
            return self.answer.to_iterable_dataset() if kwargs["streaming"] else self.answer

        monkeypatch.setattr(data, "load_dataset", load_dataset)

    @pytest.mark.parametrize("name", ["squad", "org/data-v1.2", "org/name"])
    def test_name_split_and_config_are_passed_on(self, name):
        assert load_prompts(name, split="test", config="en")["prompt"][:] == PLAIN
        assert self.calls == [((name, "en"), {"split": "test", "streaming": False})]

    def test_another_column(self):
        self.answer = Dataset.from_dict({"question": ["a"], "prompt": ["no"], "id": [1]})
        dataset = load_prompts("org/name", column="question")
        assert (dataset["prompt"][:], set(dataset.column_names)) == (["a"], {"prompt", "id"})
        assert list(load_prompts("org/name", column="question", streaming=True)) == [{"prompt": "a", "id": 1}]
        with pytest.raises(ValueError, match="`org/name` has no column `answer`, only question, prompt, id"):
            load_prompts("org/name", column="answer")


# Columns, conversations, lengths


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_another_column(tmp_path, suffix):
    rows = [{"question": "a b", "prompt": "no"}, {"question": "c", "prompt": "no"}]
    dataset = load_prompts(write_rows(tmp_path / f"rows{suffix}", rows), column="question")
    assert dataset.column_names == ["prompt"]
    assert dataset["prompt"][:] == ["a b", "c"]


@pytest.mark.parametrize("streaming", [False, True])
def test_as_conversation(tmp_path, streaming):
    messages = [{"role": "user", "content": "a"}]
    plain = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "id": 1}])
    assert list(load_prompts(plain, streaming=streaming, as_conversation=True)) == [{"prompt": messages, "id": 1}]
    chat = write_rows(tmp_path / "chat.jsonl", [{"prompt": messages}])
    assert list(load_prompts(chat, streaming=streaming, as_conversation=True)) == [{"prompt": messages}]


def test_long_prompts_are_left_out(tokenizer):
    prompts = Dataset.from_dict({"prompt": ["the cat", "the cat sat", "fish"]})
    with pytest.warns(UserWarning, match="1 of 3 prompts have more than `max_prompt_length=2` tokens"):
        assert drop_long_prompts(prompts, tokenizer, 2)["prompt"][:] == ["the cat", "fish"]
    assert list(drop_long_prompts(prompts.to_iterable_dataset(), tokenizer, 1)) == [{"prompt": "fish"}]
    with pytest.raises(ValueError, match="`max_prompt_length=1` leaves out every prompt"):
        drop_long_prompts(prompts.select([0, 1]), tokenizer, 1)
    with pytest.raises(ValueError, match="`max_prompt_length=0` must be at least 1"):
        drop_long_prompts(prompts, tokenizer, 0)


@pytest.mark.parametrize("template", [None, "{{ messages }}"])
def test_a_row_without_a_prompt_is_named_when_long_ones_are_left_out(tmp_path, template):
    (tmp_path / "a.jsonl").write_text('{"prompt": "the cat"}\n{"prompt": null}\n')
    tokenizer = build_tokenizer(chat_template=template)
    rows = drop_long_prompts(load_prompts(tmp_path, streaming=True), tokenizer, 5)
    with pytest.raises(ValueError, match="Row 2 of the prompts has an empty `prompt`; fill it in or drop the row"):
        list(rows)


def test_a_folder_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    Dataset.from_dict({"prompt": ["the cat"]}).save_to_disk(tmp_path / "rows")
    assert load_prompts("~/rows")["prompt"][:] == [row["prompt"] for row in load_prompts("~/rows", streaming=True)]
    with pytest.raises(ValueError, match="has no split 'test' .*`save_to_disk`"):
        load_prompts("~/rows", split="test")


def test_conversations_are_counted_in_their_template():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %} fish{% endif %}"
    prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in ("the cat", "the")]})
    with pytest.warns(UserWarning, match="1 of 2"):
        assert len(drop_long_prompts(prompts, tokenizer, 2)) == 1
    assert len(drop_long_prompts(prompts, tokenizer, 3)) == 2
    tokenizer.chat_template += "{% if thinking %} the cat sat{% endif %}"
    with pytest.warns(UserWarning, match="1 of 2"):
        assert len(drop_long_prompts(prompts, tokenizer, 5, {"thinking": True})) == 1
