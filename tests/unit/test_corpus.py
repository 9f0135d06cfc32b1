"""Corpus and Batches: the split, the shards, the order and its resumption."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from pyddl.errors import ConfigError
from pyddl.tasks.corpus import FEW_FILES, PIECE_BYTES, SEPARATOR, Batches, Corpus


def write_files(folder: Path, num_files: int, *, num_bytes: int = 200) -> Path:
    for index in range(num_files):
        path = folder / f"part{index % 3}" / f"file{index:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((f"{index:03d}," * num_bytes)[: num_bytes + index].encode())
    return folder


def texts(data: np.ndarray) -> list[bytes]:
    return data.tobytes().split(SEPARATOR)


def test_corpus_standard_library_is_the_default() -> None:
    corpus = Corpus.open()
    names = [document.name for document in (*corpus.train, *corpus.validation)]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)
    assert not any({"site-packages", "test", "tests"} & set(name.split("/")) for name in names)
    num_validation = sum(document.num_bytes for document in corpus.validation)
    assert 0.01 < num_validation / corpus.train_size_bytes < 0.2


def test_corpus_split_is_disjoint_and_complete(tmp_path: Path) -> None:
    corpus = Corpus.open([write_files(tmp_path, 80)])
    train, validation = texts(corpus.train_bytes()), texts(corpus.validation_bytes())
    assert 1 <= len(validation) < 20
    files = sorted(path.read_bytes() for path in tmp_path.rglob("*.txt"))
    assert sorted(train + validation) == files


def test_corpus_opened_elsewhere_splits_alike(tmp_path: Path) -> None:
    one, other = (Corpus.open([write_files(tmp_path / name / "text", 80)]) for name in ("a", "b"))
    assert [document.name for document in one.validation] == [document.name for document in other.validation]
    assert np.array_equal(one.train_bytes(1, 3), other.train_bytes(1, 3))


def test_corpus_file_added_moves_no_other_file_across_the_split(tmp_path: Path) -> None:
    before = Corpus.open([write_files(tmp_path, 80)])
    (tmp_path / "another.txt").write_text("another")
    after = Corpus.open([tmp_path])
    assert {d.name for d in before.validation} - {"another.txt"} == {d.name for d in after.validation} - {"another.txt"}


@pytest.mark.parametrize("num_shards", [1, 2, 5, 16])
def test_corpus_shards_are_disjoint_complete_and_alike_in_size(tmp_path: Path, num_shards: int) -> None:
    corpus = Corpus.open([write_files(tmp_path, 200)])
    shards = [corpus.train_bytes(shard, num_shards) for shard in range(num_shards)]
    assert sorted(text for shard in shards for text in texts(shard)) == sorted(texts(corpus.train_bytes()))
    assert max(shard.size for shard in shards) - min(shard.size for shard in shards) <= 2 * 400  # two documents


def test_corpus_more_shards_than_documents_names_the_empty_shard(tmp_path: Path) -> None:
    corpus = Corpus.open([write_files(tmp_path, 4)])
    with pytest.raises(ConfigError, match=r"shard 4 of 5 is empty"):
        corpus.train_bytes(4, 5)


@pytest.mark.parametrize(("shard", "num_shards"), [(-1, 2), (2, 2), (0, 0)])
def test_corpus_shard_out_of_range_is_refused(tmp_path: Path, shard: int, num_shards: int) -> None:
    with pytest.raises(ConfigError, match="shard"):
        Corpus.open([write_files(tmp_path, 4)]).train_bytes(shard, num_shards)


def test_corpus_single_long_file_is_cut_into_pieces(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_bytes(np.random.default_rng(0).integers(1, 256, 10 * PIECE_BYTES + 7, dtype=np.uint8).tobytes())
    corpus = Corpus.open([book])
    documents = (*corpus.train, *corpus.validation)
    assert len(documents) == 11
    assert sum(document.num_bytes for document in documents) == book.stat().st_size
    pieces = {document.name: document for document in documents}
    joined = b"".join(
        book.read_bytes()[pieces[f"book.txt#{i}"].start : pieces[f"book.txt#{i}"].stop] for i in range(11)
    )
    assert joined == book.read_bytes()


def test_corpus_many_files_are_not_cut(tmp_path: Path) -> None:
    write_files(tmp_path, FEW_FILES)
    (tmp_path / "long.txt").write_bytes(b"x" * (3 * PIECE_BYTES))
    corpus = Corpus.open([tmp_path])
    assert "long.txt" in {document.name for document in (*corpus.train, *corpus.validation)}


def test_corpus_binary_empty_hidden_and_irregular_files_are_left_out(tmp_path: Path) -> None:
    write_files(tmp_path, 3)
    (tmp_path / "binary.bin").write_bytes(b"text, then\0binary")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / ".hidden").write_bytes(b"hidden")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    corpus = Corpus.open([tmp_path])
    assert {document.path.name for document in (*corpus.train, *corpus.validation)} == {
        "file000.txt",
        "file001.txt",
        "file002.txt",
    }


def test_corpus_same_file_given_twice_counts_once(tmp_path: Path) -> None:
    write_files(tmp_path, 5)
    corpus = Corpus.open([tmp_path, tmp_path / "part0" / "file000.txt", tmp_path])
    assert len(corpus.train) + len(corpus.validation) == 5


def test_corpus_two_folders_of_one_name_keep_both(tmp_path: Path) -> None:
    roots = [write_files(tmp_path / side / "text", 3) for side in ("left", "right")]
    corpus = Corpus.open(roots)
    names = [document.name for document in (*corpus.train, *corpus.validation)]
    assert len(names) == len(set(names)) == 6


def test_corpus_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing-here does not"):
        Corpus.open([tmp_path / "nothing-here"])


@pytest.mark.parametrize("content", [None, b"one short file", b"\0binary"])
def test_corpus_too_little_text_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "only.txt").write_bytes(content)
    with pytest.raises(ConfigError, match="at least two text files"):
        Corpus.open([tmp_path])


def test_corpus_file_lost_after_opening_is_named(tmp_path: Path) -> None:
    corpus = Corpus.open([write_files(tmp_path, 5)])
    corpus.train[0].path.unlink()
    with pytest.raises(ConfigError, match=corpus.train[0].path.name):
        corpus.train_bytes()


def test_validation_bytes_limited_is_a_spread_sample(tmp_path: Path) -> None:
    corpus = Corpus.open()
    everything = corpus.validation_bytes()
    sample = corpus.validation_bytes(40_000)
    assert 36_000 <= sample.size <= 40_000
    assert np.array_equal(sample, corpus.validation_bytes(40_000))
    assert np.array_equal(sample[:4096], everything[:4096])
    assert np.array_equal(sample[-4096:], everything[-4096:])
    assert corpus.validation_bytes(100).size == 100
    assert np.array_equal(corpus.validation_bytes(10**9), everything)


# Batches ------------------------------------------------------------------------------------------


def ramp(num_bytes: int) -> np.ndarray:
    return (np.arange(num_bytes) % 251).astype(np.uint8)


def test_batches_targets_are_inputs_moved_by_one() -> None:
    x, y = next(Batches(ramp(1000), 3, 16, seed=0))
    assert x.shape == y.shape == (3, 16)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal((x + 1) % 251, y)


def test_batches_epoch_reads_every_window_once() -> None:
    batches = Batches(np.arange(256, dtype=np.uint8), 1, 8, seed=3)
    first_bytes = []
    while batches.state_dict()["epoch"] == 0:
        first_bytes.append(int(next(batches)[0][0, 0]))
    first_bytes.pop()  # the one that opened epoch 1
    offset = min(first_bytes)
    assert offset < 8
    assert sorted(first_bytes) == list(range(offset, 256 - 8, 8))
    assert first_bytes != sorted(first_bytes)


def test_batches_streams_seeds_and_epochs_differ_and_repeat() -> None:
    def head(seed: int, stream: tuple[int, ...]) -> list[int]:
        return next(Batches(ramp(4000), 64, 4, seed, stream=stream))[0][:, 0].tolist()

    heads = [head(seed, stream) for seed in (0, 1) for stream in ((0, 0), (0, 1), (1, 0))]
    assert all(a != b for a, b in itertools.combinations(heads, 2))
    assert head(1, (1, 0)) == heads[-1]
    epoch_long = Batches(ramp(41), 9, 4, seed=0)  # 9 or 10 windows an epoch
    assert not torch.equal(next(epoch_long)[0], next(epoch_long)[0])


@pytest.mark.parametrize("stop_after", [0, 1, 5, 24])
@pytest.mark.parametrize("new_batch_size", [3, 5])
def test_batches_resumed_neither_repeat_nor_skip(stop_after: int, new_batch_size: int) -> None:
    data = ramp(200)  # 28 windows, so that 24 batches of 3 pass several epochs
    whole = Batches(data, 1, 7, seed=5, stream=(2, 0))
    windows = [next(whole)[0] for _ in range(3 * stop_after + 2 * new_batch_size)]

    first = Batches(data, 3, 7, seed=5, stream=(2, 0))
    read = [next(first)[0] for _ in range(stop_after)]
    second = Batches(data, new_batch_size, 7, seed=5, stream=(2, 0))
    second.load_state_dict(first.state_dict())
    read += [next(second)[0] for _ in range(2)]
    assert torch.equal(torch.cat(read), torch.cat(windows))


def test_batches_larger_than_an_epoch_still_fill() -> None:
    x, _ = next(Batches(ramp(20), 11, 8, seed=0))
    assert x.shape == (11, 8)


def test_batches_state_of_other_data_is_refused() -> None:
    state = Batches(ramp(100), 1, 8, seed=0).state_dict()
    with pytest.raises(ConfigError, match="num_bytes = 100"):
        Batches(ramp(101), 1, 8, seed=0).load_state_dict(state)
    with pytest.raises(ConfigError, match="context_bytes = 8"):
        Batches(ramp(100), 1, 9, seed=0).load_state_dict(state)


def test_batches_shortest_possible_text_gives_its_one_window() -> None:
    x, y = next(Batches(ramp(9), 2, 8, seed=0))
    assert x.tolist() == [list(range(8))] * 2
    assert y.tolist() == [list(range(1, 9))] * 2


def test_batches_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="longer than one window of 8 bytes; this one has 8"):
        Batches(ramp(8), 1, 8, seed=0)
