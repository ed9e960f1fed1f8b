"""What the generic adapter refuses: each error names the file, the line, the key, what was found and what to do."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from estr_diag.errors import InputError, UnrecognisedError
from estr_diag.ingestion.adapter import ReadOptions
from estr_diag.ingestion.generic.adapter import batches_from_table
from estr_diag.ingestion.mapping import Mapping as ColumnMapping
from estr_diag.store.database import Store
from tests.generic_logs import a_log, as_lists, permuted, without, write

Ingested = Callable[..., Store]
ENDINGS = [".parquet", ".csv", ".csv.gz", ".jsonl", ".jsonl.gz", ".arrow"]


def refused(ingested: Ingested, path: Path, mapping: Mapping[str, Any] | None = None) -> InputError:
    options = ReadOptions(mapping=None if mapping is None else ColumnMapping.model_validate(mapping))
    with pytest.raises(InputError) as caught:
        ingested(path, options=options)
    assert str(path) in str(caught.value)
    return caught.value


def line(ending: str, row: int) -> int:
    """Return what a message calls row `row`: CSV has a header line."""
    return row + 1 if ".csv" in ending else row


@pytest.mark.parametrize("lists", [False, True])
def test_no_mask(tmp_path: Path, ingested: Ingested, lists: bool) -> None:
    log = without(a_log((3, 2)), "loss_mask")
    error = refused(ingested, write(tmp_path / "log.parquet", as_lists(log) if lists else log))
    assert error.problem == "no loss_mask: tool and observation tokens cannot be told from sampled ones"
    assert "--map" in str(error)
    assert "--all-sampled" in str(error)


def test_no_sequence_names(tmp_path: Path, ingested: Ingested) -> None:
    log = a_log((3, 2))
    log["seq_no"] = log.pop("seq_id")
    error = refused(ingested, write(tmp_path / "log.parquet", log))
    assert "no seq_id" in str(error)
    assert '[columns] seq_id = "seq_no"' in str(error)


@pytest.mark.parametrize("ending", ENDINGS)
def test_torn_sequence_without_positions(tmp_path: Path, ingested: Ingested, ending: str) -> None:
    log = without(a_log((2, 2, 1)), "pos", "token_text")
    log["seq_id"] = ["a", "a", "b", "b", "a"]
    log["step"] = [1] * 5
    error = refused(ingested, write(tmp_path / f"log{ending}", log))
    assert (error.line, error.key) == (line(ending, 5), "seq_id")
    assert "sequence 'a' goes on in row 5" in str(error)
    assert "pos" in str(error.hint)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_position_that_is_there_twice(tmp_path: Path, ingested: Ingested, ending: str, shuffled: bool) -> None:
    log = without(a_log((3, 2)), "token_text")
    log["pos"] = [0, 1, 1, 0, 1]
    if shuffled:
        log = {name: [values[i] for i in (4, 1, 0, 2, 3)] for name, values in log.items()}
    error = refused(ingested, write(tmp_path / f"log{ending}", log))
    rows = (2, 4) if shuffled else (2, 3)
    assert f"sequence 's0': pos 1 is there twice (key 'pos'); found it in row {rows[0]} and in row {rows[1]}" in str(
        error
    )
    assert error.line in {line(ending, row) for row in rows}


def test_a_position_in_a_list_that_is_there_twice(tmp_path: Path, ingested: Ingested) -> None:
    lists = as_lists(a_log((3, 2))) | {"pos": [[0, 1, 2], [1, 1]]}
    error = refused(ingested, write(tmp_path / "log.parquet", lists))
    assert "sequence 's1': pos 1 is there twice" in str(error)
    assert error.line == 2


def test_positions_before_the_first(tmp_path: Path, ingested: Ingested) -> None:
    error = refused(ingested, write(tmp_path / "log.parquet", a_log((3, 2))), {"pos_base": 1})
    assert "sequence 's0': pos 0 is before the first" in str(error)
    assert (error.line, error.key) == (1, "pos")
    log = a_log((3, 2))
    log["pos"][4] = None
    error = refused(ingested, write(tmp_path / "null.parquet", log))
    assert "sequence 's1': no pos" in str(error)
    assert error.line == 5


@pytest.mark.parametrize("ending", ENDINGS)
def test_lists_of_unequal_length(tmp_path: Path, ingested: Ingested, ending: str) -> None:
    lists = without(as_lists(a_log((3, 5, 2))), "token_text")
    lists["logp_train"][1].append(-0.5)
    error = refused(ingested, write(tmp_path / f"log{ending}", lists))
    assert (error.line, error.key) == (line(ending, 2), "logp_train")
    assert "6 values of 'logp_train' and 5 of 'token_id'" in str(error)


def test_lists_of_unequal_length_where_a_record_lacks_one(tmp_path: Path, ingested: Ingested) -> None:
    lists: dict[str, list[Any]] = {
        "logp_infer": [[-1.0], None],
        "logp_train": [None, [-1.0, -2.0]],
        "entropy": [[0.5], [0.5, 0.5]],
        "loss_mask": [[True], [True]],
    }
    error = refused(ingested, write(tmp_path / "log.parquet", lists))
    assert (error.line, error.key) == (2, "loss_mask")
    assert error.found == "1 values of 'loss_mask' and 2 of 'logp_train'"
    # The first record has no mask, so the first value of the mask's list belongs to the second.
    error = refused(ingested, write(tmp_path / "late.parquet", lists | {"loss_mask": [None, ["maybe", "true"]]}))
    assert (error.line, error.found) == (2, "'maybe'")


@pytest.mark.parametrize("ending", [".csv", ".jsonl"])
def test_half_a_token_id_in_text(tmp_path: Path, ingested: Ingested, ending: str) -> None:
    log = without(a_log((3,)), "token_text") | {"token_id": [1, 2.5, 3]}
    error = refused(ingested, write(tmp_path / f"log{ending}", log))
    assert (error.line, error.key, error.found) == (line(ending, 2), "token_id", "2.5")


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".csv", ".csv.gz"])
@pytest.mark.parametrize("lists", [False, True])
def test_text_in_a_number_column(tmp_path: Path, ingested: Ingested, ending: str, lists: bool) -> None:
    log = without(a_log((3, 2)), "token_text")
    log["logp_train"][4] = "oops"
    error = refused(ingested, write(tmp_path / f"log{ending}", as_lists(log) if lists else log))
    assert (error.line, error.key) == (line(ending, 2 if lists else 5), "logp_train")
    assert "oops" in str(error.found)
    assert "FLOAT" in str(error.expected)


def test_lines_are_counted_past_line_breaks_and_blank_lines(tmp_path: Path, ingested: Ingested) -> None:
    path = tmp_path / "log.csv"
    path.write_text('seq_id,token_text,logp_infer,loss_mask\na,"two\nlines",-0.5,1\n\na,b,oops,1\n')
    error = refused(ingested, path)
    assert (error.line, error.key, error.found) == (5, "logp_infer", "'oops'")
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"seq_id": 1, "logp_infer": -1, "loss_mask": 1}\n\n{"seq_id": 1, "logp_infer": -1, "loss_mask": 7}\n'
    )
    error = refused(ingested, path)
    assert (error.line, error.key, error.found) == (3, "loss_mask", "'7'")


@pytest.mark.parametrize(
    ("name", "values", "row", "found"),
    [
        ("logp_infer", ["-0.5", "-1", "-2"], 1, "string '-0.5'"),
        ("token_id", [1.0, 2.5, 3.0], 2, "2.5"),
        ("token_id", [1, 2, 2**31], 3, "2147483648"),
        ("turn", [0, 40000, 0], 2, "40000"),
        ("policy_version", ["v1", "v2", "v3"], 1, "string 'v1'"),
        ("logp_train", [[-0.1], [-0.2], [-0.3]], 1, "double> '[-0.1]'"),
        ("loss_mask", [0.0, 1.0, 0.5], 3, "0.5"),
        ("loss_mask", [None, "yes", "maybe"], 3, "'maybe'"),
        ("seq_id", ["a", None, "a"], 2, "null"),
        ("group_id", [["a"], ["b"], ["c"]], 1, "string> \"['a']\""),
    ],
)
def test_values_that_cannot_be_what_their_column_is(
    tmp_path: Path, ingested: Ingested, name: str, values: list[Any], row: int, found: str
) -> None:
    # The other engine's column says which layout it is.
    log = a_log((3,)) | {name: values}
    if name == "logp_train":
        log["token_text"] = log.pop("logp_train")
        name = "token_text"
    path = write(tmp_path / "log.parquet", log)
    error = refused(ingested, path)
    assert (error.line, error.key) == (row, name)
    assert f"a value in row {row} that cannot be {name}" in str(error)
    assert found in str(error.found)
    with pytest.raises(InputError, match=rf"^table:{row}: .*{re.escape(found)}"):
        list(batches_from_table(pa.table(log), None, ReadOptions()))


def test_a_bad_value_is_named_by_its_row_in_the_file_after_sorting(tmp_path: Path, ingested: Ingested) -> None:
    log = permuted(a_log((4, 4)))
    log["token_id"] = [float(x) for x in log["token_id"]]
    log["token_id"][5] = 0.5
    assert refused(ingested, write(tmp_path / "log.parquet", log)).line == 6


def test_one_value_where_a_list_is_needed(tmp_path: Path, ingested: Ingested) -> None:
    lists = as_lists(a_log((3, 2))) | {"entropy": [0.5, 0.25]}
    error = refused(ingested, write(tmp_path / "log.parquet", lists))
    assert (error.line, error.key) == (1, "entropy")
    assert "a list with one entropy a token" in str(error)


def test_a_column_of_the_mapping_that_is_not_there(tmp_path: Path, ingested: Ingested) -> None:
    log = a_log((3,))
    log["lp_engine"] = log.pop("logp_infer")
    error = refused(ingested, write(tmp_path / "log.parquet", log), {"columns": {"logp_infer": "lp_engin"}})
    assert "no column 'lp_engin', which the mapping names for logp_infer" in str(error)
    assert "Did you mean 'lp_engine'?" in str(error)
    # The same when nothing else in the file is known.
    path = write(tmp_path / "bare.parquet", {"lp_engine": [-1.0], "m": [True]})
    error = refused(ingested, path, {"columns": {"logp_infer": "lp_engin", "loss_mask": "mm"}})
    assert "Did you mean 'lp_engine'?" in str(error)


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".jsonl", ".arrow"])
def test_a_table_without_known_names_gets_a_mapping_to_fill_in(tmp_path: Path, ingested: Ingested, ending: str) -> None:
    log = a_log((3,))
    shown = {"lp_infer": log["logp_infer"], "lp train": log["logp_train"], "m": log["loss_mask"], "pos": log["pos"]}
    error = refused(ingested, write(tmp_path / f"log{ending}", shown))
    assert isinstance(error, UnrecognisedError)
    assert error.found == "columns lp_infer, lp train, m, pos"
    assert error.hint is not None
    assert "--map mapping.toml" in error.hint
    # Pasted as it is, the snippet is a mapping that this very file fits.
    snippet = error.hint.partition("\n\n")[2]
    mapping = ColumnMapping.model_validate(tomllib.loads(snippet))
    assert mapping.columns == {"logp_infer": "lp_infer", "logp_train": "lp train"}
    assert '# loss_mask = "..."' in snippet
    assert "# pos" not in snippet


def test_a_mapping_without_a_log_prob(tmp_path: Path, ingested: Ingested) -> None:
    path = write(tmp_path / "log.parquet", {"m": [True], "other": [1.0]})
    error = refused(ingested, path, {"columns": {"loss_mask": "m"}})
    assert isinstance(error, UnrecognisedError)
    assert "expected logp_infer or logp_train" in str(error)


def test_a_file_that_is_cut_off(tmp_path: Path, ingested: Ingested) -> None:
    log = without(a_log((3, 2)), "token_text")
    for ending in (".csv", ".jsonl"):
        path = write(tmp_path / f"log{ending}", log)
        path.write_bytes(path.read_bytes()[:-60])
        error = refused(ingested, path)
        assert error.line == line(ending, 5)
        assert "still being written" in str(error)
    path = write(tmp_path / "log.arrows", a_log((30, 30)))
    path.write_bytes(path.read_bytes()[:-600])
    assert "cannot be read to its end" in str(refused(ingested, path))
    path = write(tmp_path / "log.parquet", a_log((30, 30)))
    path.write_bytes(path.read_bytes()[:-60])
    assert "Parquet" in str(refused(ingested, path))


def test_two_columns_of_one_name(tmp_path: Path, ingested: Ingested) -> None:
    path = tmp_path / "log.csv"
    path.write_text("seq_id,logp_infer,loss_mask,logp_infer\na,-1,1,-2\n")
    error = refused(ingested, path)
    assert error.key == "logp_infer"
    assert "two columns" in str(error)
    path.write_text("seq_id,logp_infer,loss_mask,Logp_Infer\na,-1,1,-2\n")
    assert refused(ingested, path).key == "Logp_Infer"


def test_text_that_is_not_utf8(tmp_path: Path, ingested: Ingested) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes("seq_id,logp_infer,loss_mask\na,-1,1\né,-1,1\n".encode("latin-1"))
    error = refused(ingested, path)
    assert error.line == 3
    assert "not utf-8" in str(error.found)


def test_gzip_that_is_cut_off(tmp_path: Path, ingested: Ingested) -> None:
    path = write(tmp_path / "log.csv.gz", a_log((40, 40)))
    path.write_bytes(path.read_bytes()[:60])
    assert "end-of-stream" in str(refused(ingested, path))


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".arrow"])
def test_a_table_without_rows(tmp_path: Path, ingested: Ingested, ending: str) -> None:
    empty: dict[str, list[Any]] = {name: [] for name in a_log((1,))}
    assert "no sequences in this file" in str(refused(ingested, write(tmp_path / f"log{ending}", empty)))


def test_what_is_no_table() -> None:
    with pytest.raises(InputError, match="a dict is no table"):
        list(batches_from_table({"logp_infer": [-1.0]}, None, ReadOptions()))
    with pytest.raises(UnrecognisedError, match="columns a, b"):
        list(batches_from_table(pa.table({"a": [1], "b": [math.nan]}), None, ReadOptions()))
