"""Files of ids: byte for byte as Megatron lays them out, row for row as pyarrow writes them, and what is wrong."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as Backend

from engine.__main__ import main
from engine.data.chat import encode_chat
from engine.data.format import InvalidData
from engine.data.prepare import Prepared, prepare
from engine.data.rows import Rows, Store
from engine.data.tokens import Ids, inspect, read, write
from engine.tokenizer import Tokenizer
from tests.engine.data import make

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12]]


def index(code: int, lengths: list[int], width: int, bounds: list[int]) -> bytes:
    """An `.idx` spelled out: the header of 34 bytes, then lengths, offsets and boundaries."""
    offsets = [sum(lengths[:number]) * width for number in range(len(lengths))]
    header = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    counts = struct.pack("<QQ", len(lengths), len(bounds))
    return (
        header + counts + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(offsets)}q", *offsets) + struct.pack(f"<{len(bounds)}q", *bounds)
    )  # fmt: skip


def tarred(folder: Path, **files: bytes) -> Path:
    path = folder / "corpus.tar"
    with tarfile.open(path, "w") as tar:
        for ending, content in files.items():
            member = tarfile.TarInfo(f"corpus.{ending}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def found(path: Path) -> list[list[int]]:
    return [document.ids.tolist() for document in read(path)]


@pytest.mark.parametrize(
    ("code", "form"), [(1, "B"), (2, "b"), (3, "<h"), (4, "<i"), (5, "<q"), (8, "<H")], ids=lambda value: str(value)
)
def test_every_integer_type_of_megatron_is_read(code: int, form: str, tmp_path: Path) -> None:
    width = struct.calcsize(form)
    data = b"".join(struct.pack(form, identity) for document in DOCUMENTS for identity in document)
    idx = index(code, [3, 1, 4], width, [0, 1, 2, 3])
    (tmp_path / "a.idx").write_bytes(idx)
    (tmp_path / "a.bin").write_bytes(data)

    assert found(tmp_path / "a.idx") == found(tarred(tmp_path, bin=data, idx=idx)) == DOCUMENTS


def test_sequences_between_two_boundaries_are_one_document(tmp_path: Path) -> None:
    data = np.arange(8, dtype="<u2").tobytes()

    assert found(tarred(tmp_path, idx=index(8, [3, 1, 4], 2, [0, 2, 3]), bin=data)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(("vocab_size", "code", "width"), [(65_499, 8, 2), (65_500, 4, 4)])
def test_what_is_written_is_what_megatron_writes(vocab_size: int, code: int, width: int, tmp_path: Path) -> None:
    path = tmp_path / "a.idx"
    count = write(path, (Ids(1, np.asarray(ids)) for ids in DOCUMENTS), vocab_size=vocab_size)

    assert count == 3
    assert path.read_bytes() == index(code, [3, 1, 4], width, [0, 1, 2, 3])
    assert np.fromfile(tmp_path / "a.bin", f"<{'u' if code == 8 else 'i'}{width}").tolist() == [
        5,
        6,
        7,
        8,
        9,
        10,
        11,
        12,
    ]
    assert found(path) == DOCUMENTS


def parquet(folder: Path, **columns: Any) -> Path:
    path = folder / "a.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_parquet_has_a_document_a_row_and_says_what_is_learned(tmp_path: Path) -> None:
    assert found(parquet(tmp_path, input_ids=DOCUMENTS)) == DOCUMENTS
    labels = [[-100, 6, 7], [8], [-100, -100, 11, 12]]
    mask = [[0, 1, 1], [1], [0, 0, 1, 1]]
    for column in ({"labels": labels}, {"loss_mask": mask}):
        documents = list(read(parquet(tmp_path, input_ids=DOCUMENTS, **column)))
        assert [document.ids.tolist() for document in documents] == DOCUMENTS
        assert [
            [int(each) for each in document.trained] for document in documents if document.trained is not None
        ] == mask


def test_parquet_of_a_stream_of_text_has_no_mask_that_would_make_examples_of_it(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, [Ids(1, np.asarray([1, 2, 3])), Ids(2, np.asarray([4, 5]))], vocab_size=9)
    assert pq.read_table(path).to_pydict() == {"input_ids": [[1, 2, 3], [4, 5]]}
    late = [Ids(1, np.asarray([1, 2])), Ids(2, np.asarray([4, 5]), np.asarray([False, True]))]
    with pytest.raises(ValueError, match="write them apart"):
        write(path, late, vocab_size=9)
    assert pq.read_table(path).num_rows == 2


def test_parquet_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(
        path, [Ids(1, np.asarray([1, 2, 3]), np.asarray([False, True, True])), Ids(2, np.asarray([4, 5]))], vocab_size=9
    )

    assert pq.read_table(path).to_pydict() == {"input_ids": [[1, 2, 3], [4, 5]], "loss_mask": [[0, 1, 1], [1, 1]]}
    with pytest.raises(ValueError, match="which ids are learned"):
        write(tmp_path / "a.idx", read(path), vocab_size=9)


@pytest.mark.parametrize(
    ("columns", "line", "field", "says"),
    [
        pytest.param({"tokens": [[1]]}, 0, "input_ids", "no column input_ids", id="another column"),
        pytest.param({"input_ids": [1]}, 0, "input_ids", "a list", id="a bare number"),
        pytest.param({"input_ids": [[1.5]]}, 0, "input_ids", "integers", id="fractions"),
        pytest.param({"input_ids": [[1], None]}, 2, "input_ids", "null", id="no list"),
        pytest.param({"input_ids": [[1], [1, None]]}, 2, "input_ids", "null", id="a hole"),
        pytest.param({"input_ids": [[1], [2, -1]]}, 2, "input_ids[1]", "-1", id="below zero"),
        pytest.param(
            {"input_ids": pa.array([[2**64 - 5]], pa.list_(pa.uint64()))}, 1, "input_ids[0]", "18446744073709551611",
            id="beyond what is signed",
        ),
        pytest.param({"input_ids": [[2**31]]}, 1, "input_ids[0]", "2147483648", id="beyond"),
        pytest.param({"input_ids": [[1, 2]], "labels": [[1]]}, 1, "labels", "equal", id="fewer labels"),
        pytest.param({"input_ids": [[1, 2]], "labels": [[2, -100]]}, 1, "labels[0]", "shifted", id="shifted labels"),
        pytest.param({"input_ids": [[1, 2]], "loss_mask": [[0, 2]]}, 1, "loss_mask[1]", "0 or 1", id="a mask of 2"),
        pytest.param(
            {"input_ids": [[1, 0]], "attention_mask": [[1, 0]]}, 1, "attention_mask[1]", "padding", id="padding"
        ),
        pytest.param(
            {"input_ids": [[1]], "labels": [[1]], "loss_mask": [[1]]}, 0, None, "keep one", id="two masks"
        ),
        pytest.param({"input_ids": pa.array([], pa.list_(pa.int32()))}, 0, None, "empty", id="no row"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_parquet_is_named(columns: Any, line: int, field: str, says: str, tmp_path: Path) -> None:
    with parquet(tmp_path, **columns).open("rb") as file:
        facts = inspect(file)

    assert [(each.line, each.field) for each in facts.errors] == [(line, field)]
    assert says in facts.errors[0].message


GOOD = index(8, [3, 1, 4], 2, [0, 1, 2, 3])
DATA = np.arange(8, dtype="<u2").tobytes()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        pytest.param({"idx": b"not an index" * 9, "bin": DATA}, "MMIDIDX", id="another magic"),
        pytest.param({"idx": GOOD[:9] + b"\x02" + GOOD[10:], "bin": DATA}, "version 2", id="another version"),
        pytest.param({"idx": GOOD[:17] + b"\x07" + GOOD[18:], "bin": DATA}, "type 7", id="floats"),
        pytest.param({"idx": GOOD[:-1], "bin": DATA}, "promises", id="cut short"),
        pytest.param({"idx": GOOD, "bin": DATA[:-1]}, "beyond", id="too little data"),
        pytest.param(
            {"idx": index(8, [3, 1, 4], 2, [0, 2, 1, 3]), "bin": DATA}, "in order", id="boundaries that go back"
        ),
        pytest.param({"idx": GOOD}, "end in .bin", id="no data"),
        pytest.param({"idx": index(4, [2], 4, [0, 1]), "bin": struct.pack("<ii", 1, -5)}, "-5", id="an id below zero"),
    ],
)
def test_what_is_wrong_in_megatrons_files_is_named(files: dict[str, bytes], says: str, tmp_path: Path) -> None:
    with tarred(tmp_path, **files).open("rb") as file:
        facts = inspect(file)

    assert len(facts.errors) == 1
    assert says in facts.errors[0].message


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array([[1]]), pa.array([[2]])], names=["input_ids"] * 2), path)
    with path.open("rb") as file:
        assert "2 columns input_ids; keep one" in inspect(file).errors[0].message


def test_an_empty_bin_is_told_of_in_words(tmp_path: Path) -> None:
    (tmp_path / "a.idx").write_bytes(GOOD)
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(InvalidData, match="beyond the 0 bytes"):
        list(read(tmp_path / "a.idx"))


def test_damaged_files_are_refused_and_not_fallen_over(tmp_path: Path) -> None:
    whole = parquet(tmp_path, input_ids=[[1, 2, 3]] * 50).read_bytes()
    for broken in (whole[: len(whole) // 2], whole[:4] + bytes(len(whole) - 8) + whole[-4:], b"PAR1", bytes(600)):
        facts = inspect(io.BytesIO(broken))
        assert len(facts.errors) == 1, broken
    (tmp_path / "a.idx").write_bytes(GOOD)
    with pytest.raises(InvalidData, match=r"no a\.bin beside"):
        list(read(tmp_path / "a.idx"))


def documents(rows: Rows) -> list[list[int]]:
    whole = []
    for number in range(len(rows)):
        row = rows.row(number)
        whole += [row.tokens[row.documents == each].tolist() for each in range(int(row.documents[row.filled - 1]) + 1)]
    return whole


def test_ids_become_rows_as_they_are(tmp_path: Path) -> None:
    # Nothing is put before or behind a document: it is cut where all is learned, and whole where a mask says what is.
    (tmp_path / "data").mkdir()
    long = [list(range(20)), [1, 2, 3]]
    path = parquet(tmp_path / "data", input_ids=long)
    asked: dict[str, Any] = {"train": (path.relative_to(tmp_path),), "format": "tokens", "seq_len": 8}
    streamed = prepare(make.run(objective="pretrain", **asked), tmp_path, Tokenizer.bytes(), make.silent).train

    assert documents(streamed) == [list(range(9)), list(range(8, 17)), [16, 17, 18, 19], [1, 2, 3]]
    parquet(tmp_path / "data", input_ids=long, loss_mask=[[0] * 19 + [1], [0, 0, 1]])
    asked["seq_len"] = 32
    whole = prepare(make.run(objective="sft", **asked), tmp_path, Tokenizer.bytes(), make.silent).train

    assert documents(whole) == long
    assert whole.labels() == 2


@pytest.mark.parametrize("ending", ["idx", "parquet"])
def test_ids_that_a_vocabulary_has_no_entry_for_are_not_written(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{ending}"
    write(path, [Ids(1, np.asarray([1, 299]))], vocab_size=300)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    # In two bytes 70,000 would be 4464.
    with pytest.raises(InvalidData, match="the id is 70000") as refused:
        write(path, [Ids(1, np.asarray([1])), Ids(2, np.asarray([5, 70000]))], vocab_size=300)

    assert refused.value.findings[0].line == 2
    # What was there under the name is whole, and nothing lies beside it.
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_a_file_of_ids_is_not_written_over_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.idx"
    write(path, [Ids(1, np.asarray([1, 2]))], vocab_size=300)
    (tmp_path / "same").symlink_to(tmp_path)
    data = tmp_path / "a.bin"
    before = path.read_bytes() + data.read_bytes()
    for source, target in ((path, path), (path, tmp_path / "same" / "a.idx"), (data, path)):
        with pytest.raises(ValueError, match="write to another name"):
            write(target, read(path), vocab_size=300, source=source)

    assert path.read_bytes() + data.read_bytes() == before


def test_attributes_that_macos_puts_into_a_tar_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "corpus.tar"
    with tarfile.open(path, "w") as tar:
        for name, content in {"._a.idx": b"x", "a.idx": GOOD, "./d/._a.bin": b"x", "a.bin": DATA}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))

    assert found(path) == [[0, 1, 2], [3], [4, 5, 6, 7]]


def test_reading_ids_says_how_far_it_is(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "a.idx", [Ids(1, np.asarray([1, 2]))] * 50, vocab_size=300)
    told: list[tuple[int, int]] = []
    run = make.run(objective="pretrain", train=(Path("data/a.idx"),), format="tokens", seq_len=8)
    prepare(run, tmp_path, Tokenizer.bytes(), lambda phase, done, total, unit: told.append((done, total)))

    done, (total,) = [each for each, _ in told], {each for _, each in told}
    # Both files, read for their documents and for their digest.
    assert total == 2 * ((34 + 50 * 12 + 51 * 8) + 50 * 2 * 2)
    assert len(done) > 50
    assert done == sorted(done)
    assert done[-1] == total


def prepared(folder: Path, *, objective: str = "pretrain", vocab_size: int | None = None, **columns: Any) -> Prepared:
    (folder / "data").mkdir(exist_ok=True)
    path = parquet(folder / "data", **columns)
    run = make.run(objective=objective, train=(path.relative_to(folder),), format="tokens", seq_len=8)
    return prepare(run, folder, Tokenizer.bytes(), make.silent, vocab_size=vocab_size)


@pytest.mark.parametrize("objective", ["pretrain", "sft"])
def test_ids_of_a_large_vocabulary_keep_their_value_whatever_the_tokenizer(objective: str, tmp_path: Path) -> None:
    # Llama 3's entries beside a tokenizer of 260: in two bytes they would be 62464, 4464, 5 and 0.
    ids = [128000, 70000, 5, 65536]

    assert documents(prepared(tmp_path, objective=objective, vocab_size=128256, input_ids=[ids]).train) == [ids]


@pytest.mark.parametrize("objective", ["pretrain", "sft"])
def test_an_id_that_the_model_has_no_entry_for_is_named(objective: str, tmp_path: Path) -> None:
    assert len(prepared(tmp_path, objective=objective, vocab_size=300, input_ids=[[1, 299]]).train) == 1
    with pytest.raises(InvalidData) as refused:
        prepared(tmp_path, objective=objective, vocab_size=300, input_ids=[[1, 2], [1, 2, 300, 301]])
    (finding,) = refused.value.findings
    assert (finding.line, finding.field) == (2, "input_ids[2]")
    assert "the id is 300, and the model's vocabulary has 300 entries" in finding.message


def test_a_store_takes_no_id_that_it_has_no_room_for(tmp_path: Path) -> None:
    for size, fits, too_large in ((2**16, 65535, 65536), (2**17, 2**17 - 1, 2**17), (300, 299, 300)):
        store = Store(tmp_path / str(size), size)
        store.append(np.asarray([fits]))
        for ids in (np.asarray([too_large]), [too_large], np.asarray([-1])):
            with pytest.raises(ValueError, match="entries"):
                store.append(ids)
        store.close()
        assert np.fromfile(tmp_path / str(size) / "tokens.bin", store.dtype).tolist() == [fits]


def test_a_pretrain_does_not_learn_what_a_mask_leaves_out(tmp_path: Path) -> None:
    for column in ({"labels": [[1, 2], [3, -100]]}, {"loss_mask": [[1, 1], [1, 0]]}):
        with pytest.raises(InvalidData, match="a pretrain learns all") as refused:
            prepared(tmp_path, input_ids=[[1, 2], [3, 4]], **column)
        assert refused.value.findings[0].line == 2
    # The first id is never learned, so that a mask may leave it out.
    assert documents(prepared(tmp_path, input_ids=[[1, 2]], loss_mask=[[0, 1]]).train) == [[1, 2]]


def test_documents_in_which_no_id_follows_another_are_counted_and_named(tmp_path: Path) -> None:
    done = prepared(tmp_path, input_ids=[[1], [2, 3], []])

    assert (done.counts.examples, done.counts.kept, done.counts.untrainable) == (3, 1, 2)
    assert "2 of 3" in done.notes[0]
    assert "line 1, line 3" in done.notes[0]


def test_a_base_writes_text_and_conversations_as_ids(tmp_path: Path) -> None:
    base = make.llama_folder(tmp_path / "base")
    backend = Backend.from_file(str(base / "tokenizer.json"))
    (tmp_path / "book.jsonl").write_bytes(make.jsonl([{"text": "the hello"}, {"text": "a"}]))
    (tmp_path / "chat.jsonl").write_bytes(make.jsonl([make.chat_line("a", "b")]))

    for name, form, into in [("book", "text", "book.idx"), ("chat", "chat", "chat.parquet")]:
        data, target = str(tmp_path / f"{name}.jsonl"), str(tmp_path / into)
        assert main(["tokenize", str(base), data, "--format", form, "--into", target]) == 0

    # BOS is 1 and the end 2; the library puts the first itself.
    assert found(tmp_path / "book.idx") == [[*backend.encode(text).ids, 2] for text in ("the hello", "a")]
    (chat,) = read(tmp_path / "chat.parquet")
    expected = encode_chat(Tokenizer.load(base), make.talk("a", "b"))
    assert chat.trained is not None
    assert (chat.ids.tolist(), chat.trained.tolist()) == (expected.ids, expected.trained)


def test_text_does_not_load_what_reads_parquet() -> None:
    program = "import sys, engine.data.examine, engine.data.prepare\nprint({'torch', 'pyarrow'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert ran.stdout.strip() == "set()"


def test_memory_does_not_grow_with_a_file_of_ids(tmp_path: Path) -> None:
    program = (
        "import resource, sys\nfrom engine.data.tokens import inspect\n"
        "facts = inspect(open(sys.argv[1], 'rb'))\n"
        "print(facts.tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for groups in (4, 64):
        path = tmp_path / f"{groups}.parquet"
        schema = pa.schema([("input_ids", pa.list_(pa.int32()))])
        rows = pa.array(
            [np.arange(number, number + 1000, dtype=np.int32) for number in range(250)], schema.field(0).type
        )
        with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
            for _ in range(groups):
                writer.write_batch(pa.record_batch([rows], schema=schema))
        ran = subprocess.run(
            [sys.executable, "-c", program, path], capture_output=True, text=True, timeout=60, check=True
        )
        tokens, peak = map(int, ran.stdout.split())
        assert tokens == groups * 250 * 1000
        peaks.append(peak)

    # Of the 60 MB that one file has more than the other, less than a fifth, in KiB.
    assert peaks[1] - peaks[0] < 12_000
