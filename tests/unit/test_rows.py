"""Rows of files: what is read, and what is said of a file that can't be."""

import gzip
import json
import re

import datasets
import pandas
import pyarrow
import pytest

from torchtitan.experiments.rl.data.rows import MemoryRows, RowDataset, load_rows, row_datasets
from torchtitan.experiments.rl.errors import ConfigError, MissingError

ROWS = [{"question": "6 * 7?", "answer": "42"}, {"question": "Größe?", "answer": "4"}]
LINES = [json.dumps(row, ensure_ascii=False) for row in ROWS]


def read(tmp_path, name: str, content: bytes | str, **fields):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load_rows(RowDataset.Config(path=str(file), **fields), field="dataset")


READ = {
    "lines": ("a.jsonl", "\n".join(LINES)),
    "a byte order mark": ("a.jsonl", b"\xef\xbb\xbf" + "\n".join(LINES).encode()),
    "blank lines, Windows ends": ("a.jsonl", "\r\n\r\n" + "\r\n \r\n".join(LINES) + "\r\n\n"),
    "lines in a .json": ("a.json", "\n".join(LINES)),
    "a list": ("a.json", json.dumps(ROWS, indent=2)),
    "a list with a mark": ("a.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
    "commas": ("a.csv", "question,answer\n6 * 7?,forty\nGröße?,four\n"),
    "commas, a mark and blank lines": (
        "a.csv",
        b"\xef\xbb\xbf" + "question,answer\r\n6 * 7?,forty\r\n\r\nGröße?,four".encode(),
    ),
    "compressed lines": ("a.jsonl.gz", gzip.compress("\n".join(LINES).encode())),
    "compressed commas": (
        "a.csv.gz",
        gzip.compress("question,answer\n6 * 7?,forty\nGröße?,four\n".encode()),
    ),
    "tabs": ("a.tsv", "question\tanswer\n6 * 7?\tforty\nGröße?\tfour\n"),
    "capitals": ("a.CSV", "question,answer\n6 * 7?,forty\nGröße?,four\n"),
}


@pytest.mark.parametrize(("name", "content"), READ.values(), ids=READ)
def test_marks_and_blank_lines_make_no_difference(tmp_path, name, content):
    rows = read(tmp_path, name, content)
    assert [row["question"] for row in rows] == ["6 * 7?", "Größe?"]
    assert [row["answer"] for row in rows] == (
        ["forty", "four"] if "forty" in str(rows) else ["42", "4"]
    )


UNREADABLE = {
    "empty": ("a.jsonl", "", "is empty: want at least one row"),
    "blank": ("a.jsonl", " \n\n", "is empty: want at least one row"),
    "no rows": ("a.json", "[]", "is empty"),
    "a header alone": ("a.csv", "question,answer\n", "is empty"),
    "UTF-16": ("a.jsonl", "\n".join(LINES).encode("utf-16"), "is UTF-16 or no text: `iconv -f UTF-16 -t UTF-8 a.jsonl` makes"),
    "UTF-16 without a mark": ("a.csv", "question,answer\n1,2".encode("utf-16-le"), "is UTF-16 or no text"),
    "Latin 1": ("a.jsonl", b'{"question": "a"}\n{"question": "Gr\xf6\xdfe"}', "line 2 is no UTF-8 (byte 0xf6)"),
    "a torn line": ("a.jsonl", LINES[0] + "\n\n" + LINES[1][:-9], "line 3 is no JSON (Unterminated string starting at at char"),
    "a line of no object": ("a.jsonl", LINES[0] + "\n7", "line 2 is int '7', want an object"),
    "a list as lines": ("a.jsonl", json.dumps(ROWS), "; a file that is one list is named .json"),
    "an entry of no object": ("a.json", json.dumps([*ROWS, "?"]), "row 2 is str '?', want an object"),
    "half a character": ("a.jsonl", LINES[0] + '\n{"question": "\\ud800"}', "line 2 has half of a character"),
    "another kind": ("a.txt", "a text", "want a file of one of the kinds .jsonl, .json, .parquet, .csv, .tsv, or of text and"),
    "a torn list": ("a.json", json.dumps(ROWS)[:-3], "is no JSON: "),
    "a comma too many": ("a.csv", "question,answer\n1,2\na, b,3\n", "line 3 has 3 values, and the header 2"),
    "an open quote": ("a.csv", 'question,answer\n1,2\n"a,3\n', "line 3 is no CSV (unexpected end of data): see to its quotes"),
    "a column twice": ("a.csv", "a,a\n1,2\n", "its first line names a column twice (a, a)"),
    "semicolons": ("a.csv", "question;answer\n1,5;2\n", "its columns are separated by semicolons ('question;answer'): pandas."),
    "tabs": ("a.csv", "question\tanswer\n1\t2\n", "separated by tabs ('question\\tanswer'): name the file .tsv"),
    "commas for tabs": ("a.tsv", "question,answer\n1,2\n", "separated by commas ('question,answer'): name the file .csv"),
    "no gzip": ("a.jsonl.gz", b"{}", "is no whole .gz file (Not a gzipped file (b'{}')): compress it again"),
    "a torn gzip": ("a.jsonl.gz", gzip.compress(b"{}" * 99)[:-9], "is no whole .gz file ("),
    "another compression": ("a.jsonl.zst", b"", "want a file of one of the kinds"),
    "no Parquet": ("a.parquet", b"PAR1 is not all", "is no Parquet file that can be read: "),
    "an empty Parquet": ("a.parquet", b"", "is no Parquet file that can be read: "),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_is_wrong_with_a_file_is_said_by_its_line_with_the_cure(
    tmp_path, name, content, message
):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, name, content)
    text = str(error.value)
    assert text.startswith(f"dataset.path = '{tmp_path / name}': ") and message in text, text
    assert "\n" not in text and not re.search(r"\w+\.py:\d+", text)


def test_a_path_that_is_no_file_of_rows_is_named_once(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "a.txt").write_text("a text")
    kinds = ".jsonl, .json, .parquet, .csv, .tsv, or of text and .gz"
    for name, file, cure in (
        ("folder.jsonl", "folder.jsonl", "is no file"),
        ("*.txt", "a.txt", f"want a file of one of the kinds {kinds}"),
    ):
        with pytest.raises(ConfigError) as error:
            load_rows(RowDataset.Config(path=str(tmp_path / name)), field="dataset")
        assert str(error.value) == f"dataset.path = '{tmp_path / file}': {cure}"


def test_values_of_a_csv_are_the_text_of_the_file_whatever_stands_in_the_other_rows(tmp_path):
    rows = read(tmp_path, "a.csv", 'a,b,c,d,e\n1,1.50,007,,"x, ""y"""\n-2,3,8,7,NA\n')
    assert rows == [
        {"a": "1", "b": "1.50", "c": "007", "d": None, "e": 'x, "y"'},
        {"a": "-2", "b": "3", "c": "8", "d": "7", "e": "NA"},
    ]


def test_spaces_behind_the_commas_of_a_csv_belong_to_no_column_and_no_value(tmp_path):
    rows = read(tmp_path, "a.csv", 'question, answer\n6 * 7?, "42"\n')
    assert rows == [{"question": "6 * 7?", "answer": "42"}]


def test_a_parquet_file_has_pythons_types(tmp_path):
    pandas.DataFrame([{"a": 1, "b": ["x"]}, {"a": 2, "b": []}]).to_parquet(tmp_path / "a.parquet")
    assert read(tmp_path, "a.parquet", (tmp_path / "a.parquet").read_bytes()) == [
        {"a": 1, "b": ["x"]},
        {"a": 2, "b": []},
    ]


def test_nan_in_a_file_and_missing_values_in_a_frame_are_none(tmp_path):
    assert read(tmp_path, "a.jsonl", '{"a": NaN, "b": "nan"}') == [{"a": None, "b": "nan"}]
    frame = pandas.DataFrame(
        [{"a": "x", "b": pandas.NaT}, {"a": float("nan"), "b": pandas.Timestamp("2024-01-05")}]
    )
    rows = load_rows(RowDataset.Config(rows=MemoryRows(frame)), field="dataset")
    assert rows == [{"a": "x", "b": None}, {"a": None, "b": pandas.Timestamp("2024-01-05")}]


def test_a_column_that_a_row_lacks_is_none_and_rows_are_found_by_their_line(tmp_path):
    rows = read(tmp_path, "a.jsonl", '\n{"a": 1}\n\n{"b": 2}')
    assert rows == [{"a": 1, "b": None}, {"a": None, "b": 2}]
    assert [rows.location(0), rows.location(1)] == ["line 2", "line 4"]


@pytest.mark.parametrize("split", ["train[:75%]", "0.75", ".75"])
def test_a_slice_and_a_share_take_the_first_rows_of_a_file_and_of_memory(tmp_path, split):
    content = "\n".join(json.dumps({"n": n}) for n in range(8))
    rows = read(tmp_path, "a.jsonl", content, split=split)
    assert [row["n"] for row in rows] == [0, 1, 2, 3, 4, 5] and rows.location(5) == "line 6"
    config = RowDataset.Config(rows=MemoryRows([{"n": n} for n in range(8)]), split=split)
    assert [row["n"] for row in load_rows(config, field="dataset")] == [0, 1, 2, 3, 4, 5]
    rest = config.rest()
    assert (rest is not None) == ("[" not in split)
    if rest is not None:
        assert [row["n"] for row in load_rows(rest, field="dataset")] == [
            6,
            7,
        ] and rest.rest() is None


def test_a_pattern_names_several_files_in_the_order_of_their_names(tmp_path):
    (tmp_path / "b.jsonl").write_text(LINES[1])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(("\n" + LINES[0]).encode()))
    rows = load_rows(RowDataset.Config(path=str(tmp_path / "*.jsonl*")), field="dataset")
    assert rows == ROWS and [rows.location(0), rows.location(1)] == [
        "a.jsonl.gz, line 2",
        "b.jsonl, line 1",
    ]

    for index, row in enumerate(ROWS):
        pandas.DataFrame([row]).to_parquet(tmp_path / f"{index}.parquet")
    config = RowDataset.Config(path=str(tmp_path / "*.parquet"), split="0.5")
    assert (
        load_rows(config, field="dataset") == ROWS[:1]
        and load_rows(config.rest(), field="dataset") == ROWS[1:]
    )

    with pytest.raises(MissingError, match="no file fits this pattern"):
        load_rows(RowDataset.Config(path=str(tmp_path / "*.csv")), field="dataset")
    (tmp_path / "c.jsonl").write_text("{")
    with pytest.raises(ConfigError, match=r"c\.jsonl': line 1 is no JSON"):
        RowDataset.Config(path=str(tmp_path / "*.jsonl")).check_present(field="dataset")


def test_a_folder_of_save_to_disk_is_read_and_its_split_named(tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(
        tmp_path / "both"
    )

    def load(name, **fields):
        config = RowDataset.Config(path=str(tmp_path / name), **fields)
        config.check_present(field="dataset")
        return load_rows(config, field="dataset")

    assert (
        load("one") == ROWS
        and load("one", split="train[50%:]") == ROWS[1:]
        and load("one", split="0.5") == ROWS[:1]
    )
    assert load("both") == ROWS and load("both", split="test") == ROWS[1:]
    with pytest.raises(
        ConfigError,
        match=r"dataset\.split = 'validation': .*both has the splits train, test: name one",
    ):
        load("both", split="validation")


def test_tables_in_memory_are_taken_whichever_library_made_them():
    table = datasets.Dataset.from_list(ROWS)
    for data in (table, pyarrow.Table.from_pylist(ROWS), pandas.DataFrame(ROWS), tuple(ROWS)):
        dataset, _ = row_datasets(data, None, None)
        assert load_rows(dataset, field="dataset") == ROWS


def test_what_is_nearly_a_table_is_refused_in_one_line_with_the_way_out():
    table = datasets.Dataset.from_list(ROWS)
    ways = {
        "data['train'], and validation=data['test']": datasets.DatasetDict(
            {"train": table, "test": table}
        ),
        "list(data.take(10_000)) are its first rows": table.to_iterable_dataset(),
        "pandas.DataFrame(data) makes rows of columns": {"question": ["6 * 7?"], "answer": ["42"]},
    }
    for way, data in ways.items():
        with pytest.raises(ConfigError) as error:
            row_datasets(data, None, None)
        text = str(error.value)
        assert text.endswith(way) and "\n" not in text and len(text) < 400, text
