"""Tables that users write: what would be misread is refused with its line, in prompts, attack tables and negative data."""

import json
import warnings

import pytest

from trl_repulse.data import load_prompts
from trl_repulse.evaluation.gcg.evaluator import load_table
from trl_repulse.evaluation.preferences import read_rewarded


def read_prompts(path):
    return [tuple(row.values()) for row in load_prompts(path)]


def read_targets(path):
    path.write_bytes(path.read_bytes().replace(b"prompt", b"goal").replace(b"tag", b"target"))
    return [(row.goal, row.target) for row in load_table(path)]


READERS = [read_prompts, read_targets]
ROWS = [(f"question {i}", f"answer {i}") for i in range(100)]


def lines(rows=ROWS):
    return ["prompt,tag", *(f"{prompt},{tag}" for prompt, tag in rows)]


def write(tmp_path, text):
    path = tmp_path / "table.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.fixture(autouse=True)
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("read", READERS)
class TestQuotes:
    def refused(self, read, path, message):
        with pytest.raises(ValueError, match=message) as error:
            read(path)
        assert "\n" not in str(error.value) and "table.csv" in str(error.value)

    @pytest.mark.parametrize("opened", ['"question 2,answer 2', 'question 2,"answer 2'])
    def test_one_that_is_never_closed(self, tmp_path, read, opened):
        rows = lines()
        rows[3] = opened
        path = write(tmp_path, "\n".join(rows) + "\n")
        self.refused(read, path, "in the row that begins at line 4, has a quote that is not balanced .* close it")

    def test_one_that_the_quote_of_a_later_row_seems_to_close(self, tmp_path, read):
        """Pandas' default engine and pyarrow make one row of both."""
        rows = lines()
        rows[3], rows[7] = '"question 2,answer 2', '"question 6",answer 6'
        path = write(tmp_path, "\n".join(rows) + "\n")
        self.refused(read, path, "Line 8 of .*, in the row that begins at line 4, has a quote that is not balanced")

    @pytest.mark.parametrize("field", ['"say "no" now"', r'"say \"no\" now"', '"no" now', '"no" '])
    def test_text_behind_a_closing_quote(self, tmp_path, read, field):
        path = write(tmp_path, f"prompt,tag\na,b\n{field},c\nd,e\n")
        self.refused(read, path, 'Line 3 of .* begins at line 3, .* write a quote inside quotes as ""')

    def test_one_that_is_never_closed_in_a_large_file(self, tmp_path, read):
        path = write(tmp_path, 'prompt,tag\n"a,b\n' + "c,d\n" * 50_000)
        self.refused(read, path, "begins at line 2, .* field limit .* a file of JSON lines")

    def test_two_stray_ones_are_warned_of_where_the_lines_look_like_rows(self, tmp_path, read):
        rows = lines()
        rows[3], rows[7] = '"question 2,answer 2', 'question 6",answer 6'
        path = write(tmp_path, "\n".join(rows) + "\n")
        with pytest.warns(UserWarning, match=r"table.csv` has fields .* look like rows .*\(lines 4 to 8\)"):
            found = read(path)
        assert found[2] == (
            "question 2,answer 2\nquestion 3,answer 3\nquestion 4,answer 4\nquestion 5,answer 5\nquestion 6",
            "answer 6",
        )
        rows[3], rows[7] = 'question 2,"answer 2', 'question 6,answer 6"'
        with pytest.warns(UserWarning, match=r"\(lines 4 to 8\)"):
            assert len(read(write(tmp_path, "\n".join(rows)))) == 96

    @pytest.mark.parametrize(
        "field",
        [
            "Dear sir,\nhelp me",
            "a\n\nb",
            "one, two\nthree, four\nfive",
            "a,b\nc\nd,e",
            "a\r\nb",
            'say "no"\nnow',
            "\nb",
        ],
    )
    def test_texts_of_several_lines_are_served(self, tmp_path, read, field):
        quoted = field.replace('"', '""')
        path = write(tmp_path, f'prompt,tag\nx,y\n"{quoted}",z\nx,"{quoted}"\n')
        assert read(path) == [("x", "y"), (field, "z"), ("x", field)]

    def test_in_the_middle_of_a_field_they_are_text(self, tmp_path, read):
        assert read(write(tmp_path, 'prompt,tag\nhe said "no",5" wide\n')) == [('he said "no"', '5" wide')]


@pytest.mark.parametrize("read", READERS)
class TestFields:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("prompt,prompt,tag\na,b,c\n", "has 2 columns named '(prompt|goal)'; rename or remove all but one"),
            ("prompt,tag,id,id\na,b,c,d\n", "has 2 columns named 'id'"),
            ("prompt,tag,,\na,b,,\n", "has 2 columns without a name; name or remove them"),
            (
                'prompt;tag\n"a ""b"" c";d\n',
                "has one column, named '(prompt;tag|goal;target)'; separate its fields with",
            ),
            ("prompt\ttag\na, b\tc\n", "has one column, named .*; separate its fields with commas"),
            ("prompt,tag\na,b\nc,d, e\n", r"Row 2 of .*, at line 3, has more fields than the header \(3, not 2\)"),
            ("prompt,tag\na,b\n\nc\n", r"Row 2 of .*, at line 4, has fewer fields than the header \(1, not 2\)"),
            ('prompt,tag\n"a\nb",c\nd\n', "Row 2 of .*, at line 4, has fewer fields"),
            (
                "prompt,tag\na,b\nna\xefve,c\n".encode("latin-1"),
                "Line 3 of .* is not UTF-8 text .*; save the file as UTF-8",
            ),
            ("prompt,tag\na,b\n".encode("utf-16"), "Line 1 of .* is not UTF-8 text"),
            ("prompt,tag\na,b\n".encode("utf-16-le"), "Line 1 of .* has a NUL byte"),
            ("prompt,tag\na,b\nc\0,d\n", "Line 3 of .* has a NUL byte, so it is not UTF-8 text; save"),
            ("prompt,tag\n", "table.csv` (is empty|has no rows); give it at least one"),
            ("", "table.csv` (is empty|has no rows); give it at least one"),
        ],
    )
    def test_refused(self, tmp_path, read, text, message):
        with pytest.raises(ValueError, match=message) as error:
            read(write(tmp_path, text))
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("form", ["utf-8", "utf-8-sig"])
    @pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
    def test_all_rows_are_served(self, tmp_path, read, form, end):
        assert read(write(tmp_path, (end.join(lines()) + end).encode(form))) == ROWS

    def test_fields_are_text(self, tmp_path, read):
        words = ["NA", "null", "None", "1e5", "007", "1", "true", "2024-01-01", "-inf", "N/A"]
        rows = [(word, word) for word in words]
        assert read(write(tmp_path, "\n".join(lines(rows)))) == rows

    def test_long_fields(self, tmp_path, read):
        assert read(write(tmp_path, f"prompt,tag\n{'x' * 130_000},y\n")) == [("x" * 130_000, "y")]


def test_one_column_of_lines_that_may_be_rows(tmp_path):
    """Nothing tells a text of several lines from rows between two stray quotes, as `docs/data.md` says."""
    assert read_prompts(write(tmp_path, 'prompt\n"a\nb\nc"\nd\n')) == [("a\nb\nc",), ("d",)]


# JSON

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (f'{{"prompt": "a", "tag": {DEEP}}}', "Line 2 of .* is nested too deeply to be read; flatten it"),
        (f'{{"prompt": {DEEP}}}', "Line 2 of .* is nested too deeply"),
        (
            '{"prompt": "bad one", "prompt": "fish", "completion": "c"}',
            "Line 2 of .* has the key 'prompt' twice, with 'bad one' and 'fish': keep one",
        ),
        (
            '{"prompt": [{"role": "user", "content": "a", "content": "b"}], "completion": "c"}',
            "Line 2 of .* the key 'content' twice",
        ),
        (f'{{"prompt": "a", "tag": {"9" * 5000}}}', "Line 2 of .* is not valid JSON"),
    ],
    ids=["deep", "deep prompt", "two prompts", "two contents", "digits"],
)
@pytest.mark.parametrize("read", [load_prompts, read_rewarded])
def test_json_that_would_be_misread(tmp_path, read, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b", "reward": 0.0}\n' + row + "\n")
    with pytest.raises(ValueError, match=message) as error:
        read(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("depth", [60, 100, 300, 900])
@pytest.mark.parametrize(("opens", "inside", "closes"), [("[", "", "]"), ('{"a":', "1", "}")])
def test_columns_that_arrow_cannot_hold_are_kept_as_they_are(tmp_path, depth, opens, inside, closes):
    path = tmp_path / "rows.jsonl"
    row = f'{{"prompt": "a", "id": 1, "meta": {opens * depth}{inside}{closes * depth}}}\n'
    path.write_text(row * 2)
    try:
        assert load_prompts(path)[1] == json.loads(row)
    except ValueError as error:
        assert depth == 900 and "is nested too deeply" in str(error)


def test_lines_end_in_any_way(tmp_path):
    path = tmp_path / "rows.jsonl"
    for end in ("\n", "\r\n", "\r"):
        rows = (json.dumps({"prompt": f"a\u2028{i}"}, ensure_ascii=False) for i in range(3))
        path.write_bytes(("\ufeff" + end.join(rows)).encode())
        assert read_prompts(path) == [("a\u20280",), ("a\u20281",), ("a\u20282",)]


def test_a_target_is_asked_for_in_its_context(tmp_path):
    path = tmp_path / "harmbench.csv"
    path.write_text("goal,target,ContextString\nthe cat,Sure,fish ate\nthe dog,Sure,\n")
    assert [row.goal for row in load_table(path)] == ["fish ate\n\n---\n\nthe cat", "the dog"]
    path.write_text("target,ContextString\nSure,fish ate\n")
    assert [(row.goal, row.target) for row in load_table(path, "strings")] == [("", "Sure")]
