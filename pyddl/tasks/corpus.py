"""Text for byte-level language models: where it comes from, how it is split, and in which order it is read.

Here: :class:`Corpus` (files -> documents -> training shards and held-out bytes) and :class:`Batches` (bytes
-> an endless, resumable stream of batches). Not here: models and training loops. The vocabulary is the 256
byte values, so there is no tokenizer and one token is one byte.

The split is by document and fixed by a hash of the document's name: it is the same on every machine, for any
number of learners and any seed. A document is a file; a corpus of few files (one book, say) is cut into
pieces instead, each a document of its own, so that there is something to hold out and something for every
learner.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..config import require
from ..errors import ConfigError

__all__ = ["Batches", "Corpus", "Document"]

_log = logging.getLogger(__name__)

VALIDATION_SHARE = 0.05
FEW_FILES = 64  # with fewer files than this, files are cut into pieces
PIECE_BYTES = 64 * 1024
SEPARATOR = b"\0"  # between documents; text has no NUL, so the model can learn that a document begins
_PROBE_BYTES = 8 * 1024  # a NUL within so many bytes marks a file as binary
_VALIDATION_BLOCK_BYTES = 4 * 1024
_STDLIB_SKIPPED = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})


@dataclass(frozen=True)
class Document:
    """Bytes ``start`` to ``stop`` of one file, under a name that does not say where the file lies."""

    name: str
    path: Path
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return self.stop - self.start

    def hash_words(self) -> tuple[int, int]:
        """Two 64-bit words of the name's SHA-256: the first decides the split, the second the order."""
        digest = hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")


@dataclass(frozen=True)
class Corpus:
    """Documents, split once and for all into training and validation; their bytes are read when asked for.

    Attributes:
        train: training documents, in the order of the hash of their names; at least one.
        validation: held-out documents (about 5 %), likewise; at least one.
    """

    train: tuple[Document, ...]
    validation: tuple[Document, ...]

    @classmethod
    def open(cls, paths: Sequence[Path] | None = None) -> Corpus:
        """Find the documents and split them; reads no more than the first 8 KiB of each file.

        Args:
            paths: text files and folders (read recursively; names that begin with a dot are left out). None:
                the source of this interpreter's standard library, without its tests.

        Raises:
            ConfigError: if a path does not exist, or the text is too little to hold anything out.
        """
        files = _stdlib_files() if paths is None else _files_under(paths)
        sizes = {name: _text_size_bytes(path) for name, path in files.items()}
        texts = {name: size for name, size in sorted(sizes.items()) if size}
        _log.debug(
            "corpus: %d text files, %d binary, unreadable or empty ones left out",
            len(texts),
            len(files) - len(texts),
        )

        documents = []
        for name, size in texts.items():
            if len(texts) >= FEW_FILES or size <= PIECE_BYTES:
                documents.append(Document(name, files[name], 0, size))
            else:
                for piece, start in enumerate(range(0, size, PIECE_BYTES)):
                    stop = min(start + PIECE_BYTES, size)
                    documents.append(Document(f"{name}#{piece}", files[name], start, stop))
        if len(documents) < 2:
            origin = "the standard library" if paths is None else ", ".join(map(str, paths)) or "no path"
            raise ConfigError(
                f"a corpus must hold at least two text files, or one longer than {PIECE_BYTES} bytes, so "
                f"that some text can be held out; {origin} has {len(documents)} of "
                f"{sum(texts.values())} bytes; name other files or folders in lm.data"
            )
        threshold = int(VALIDATION_SHARE * 2**64)
        by_split_hash = sorted(documents, key=lambda document: document.hash_words()[0])
        num_validation = sum(document.hash_words()[0] < threshold for document in by_split_hash)
        num_validation = min(max(num_validation, 1), len(documents) - 1)  # at least one document on either side
        return cls(
            train=_in_hash_order(by_split_hash[num_validation:]),
            validation=_in_hash_order(by_split_hash[:num_validation]),
        )

    @property
    def train_size_bytes(self) -> int:
        """Bytes of all training documents, separators not counted."""
        return sum(document.num_bytes for document in self.train)

    def shard_documents(self, shard: int, num_shards: int) -> tuple[Document, ...]:
        """The training documents of one shard; shards are disjoint, their union is ``train``.

        In hash order each document goes to the shard that is shortest so far, so that shards are alike in
        size as well as in content.
        """
        require(num_shards >= 1, "num_shards", "at least 1", num_shards)
        require(0 <= shard < num_shards, "shard", f"0 to num_shards - 1 ({num_shards - 1})", shard)
        sizes = [0] * num_shards
        mine = []
        for document in self.train:
            shortest = sizes.index(min(sizes))
            sizes[shortest] += document.num_bytes
            if shortest == shard:
                mine.append(document)
        if not mine:
            raise ConfigError(
                f"every shard must hold at least one training document; shard {shard} of {num_shards} is "
                f"empty, the corpus has only {len(self.train)}; use fewer learners or more text (lm.data)"
            )
        return tuple(mine)

    def train_bytes(self, shard: int = 0, num_shards: int = 1) -> NDArray[np.uint8]:
        """The training text of one shard.

        Args:
            shard: which one, 0 to ``num_shards`` - 1; by convention the learner_id.
            num_shards: how many there are; by convention the number of learners.

        Returns: [n] uint8, documents joined by a NUL byte.
        Raises: ConfigError if the shard is empty.
        """
        return _read(self.shard_documents(shard, num_shards))

    def validation_bytes(self, limit_bytes: int = 0) -> NDArray[np.uint8]:
        """The held-out text, or a sample of it that is spread evenly over all of it.

        Args:
            limit_bytes: at most so many; 0: all. A sample consists of blocks of 4 KiB.

        Returns: [n] uint8, the same for every call with the same limit.
        """
        require(limit_bytes >= 0, "limit_bytes", "0 (all) or more", limit_bytes)
        text = _read(self.validation)
        if not limit_bytes or text.size <= limit_bytes:
            return text
        block = min(_VALIDATION_BLOCK_BYTES, limit_bytes)
        num_blocks = limit_bytes // block
        starts = np.linspace(0, text.size - block, num_blocks).astype(np.int64)
        return np.concatenate([text[start : start + block] for start in starts])


class Batches(Iterator[tuple[torch.Tensor, torch.Tensor]]):
    """An endless stream of batches that can be stopped and resumed without repeating or skipping a window.

    The text is cut into windows of ``context_bytes`` that do not overlap. Each epoch reads every window once,
    in an order and from a first offset that depend on (seed, stream, epoch) alone; a batch may reach into the
    next epoch. The generator is numpy's PCG64 bit stream, which numpy keeps fixed across its versions.
    """

    def __init__(
        self,
        data: NDArray[np.uint8],
        batch_size: int,
        context_bytes: int,
        seed: int,
        *,
        stream: Sequence[int] = (),
    ) -> None:
        """Start at the first window of epoch 0.

        Args:
            data: [n] uint8, n > ``context_bytes``.
            batch_size: windows per batch, >= 1.
            context_bytes: length of a window, >= 1.
            seed: of the run, >= 0.
            stream: whose stream this is, by convention (learner_id, rank); each number >= 0.

        Raises: ConfigError if the text is shorter than one window.
        """
        require(batch_size >= 1, "batch_size", "at least 1", batch_size)
        require(context_bytes >= 1, "context_bytes", "at least 1", context_bytes)
        if data.size <= context_bytes:
            raise ConfigError(
                f"a training shard must be longer than one window of {context_bytes} bytes; this one has "
                f"{data.size}; use a shorter context, fewer learners or more text (lm.data)"
            )
        self._data = data
        self._batch_size = batch_size
        self._context = context_bytes
        self._key = (seed, *stream)
        self._epoch = 0
        self._position = 0  # windows of this epoch already given out
        self._starts = self._window_starts(0)

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x, y): int64 [batch_size, context_bytes] each; y is x moved on by one byte."""
        pieces: list[NDArray[np.int64]] = []
        missing = self._batch_size
        while missing:
            if self._position == self._starts.size:
                self._epoch, self._position = self._epoch + 1, 0
                self._starts = self._window_starts(self._epoch)
            piece = self._starts[self._position : self._position + missing]
            self._position += piece.size
            missing -= piece.size
            pieces.append(piece)
        offsets = np.concatenate(pieces)[:, None] + np.arange(self._context + 1)  # [batch, context + 1]
        windows = torch.from_numpy(self._data[offsets].astype(np.int64))
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        """The position in the stream, and what :meth:`load_state_dict` needs to recognise the data."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_bytes": int(self._data.size),
            "context_bytes": self._context,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where ``state`` was taken; the batch size may have changed since.

        Raises: ConfigError if the state was taken over other data or another context.
        """
        here = self.state_dict()
        for name in ("num_bytes", "context_bytes"):
            if state.get(name) != here[name]:
                raise ConfigError(
                    f"a data position must be resumed on the data it was taken from, "
                    f"{name} = {state.get(name)}; here {name} is {here[name]}; "
                    "restore lm.data, lm.context and the number of learners, or start a new run"
                )
        starts = self._window_starts(int(state["epoch"]))
        require(0 <= state["position"] <= starts.size, "position", f"0 to {starts.size}", state["position"])
        self._epoch, self._position, self._starts = int(state["epoch"]), int(state["position"]), starts

    def _window_starts(self, epoch: int) -> NDArray[np.int64]:
        """First byte of each window, in this epoch's order; a new offset moves the windows' borders."""
        bits = np.random.PCG64(np.random.SeedSequence((*self._key, epoch)))
        highest_offset = min(self._context - 1, self._data.size - 1 - self._context)
        offset = int(bits.random_raw()) % (highest_offset + 1)
        num_windows = (self._data.size - 1 - offset) // self._context
        order = np.argsort(bits.random_raw(num_windows), kind="stable")
        return offset + order * self._context


def _stdlib_files() -> dict[str, Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return {name: path for name, path in _walk(root, _STDLIB_SKIPPED).items() if name.endswith(".py")}


def _files_under(paths: Sequence[Path]) -> dict[str, Path]:
    """Files by name, relative to the path given; with several paths the name starts with the folder's."""
    files: dict[str, Path] = {}
    seen: set[Path] = set()
    for given in map(Path, paths):
        if given.is_dir():
            found = _walk(given, frozenset())
        elif given.exists():
            found = {given.name: given}
        else:
            raise ConfigError(f"every path in lm.data must exist; {given} does not; correct it or leave lm.data empty")
        for name, path in found.items():
            if (real := path.resolve()) in seen:  # given twice, or a folder and a file in it
                continue
            seen.add(real)
            name = f"{given.name}/{name}" if len(paths) > 1 and given.is_dir() else name
            while name in files:  # two roots with the same last part
                name += "'"
            files[name] = path
    return files


def _walk(root: Path, skipped: frozenset[str]) -> dict[str, Path]:
    files = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in skipped and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith("."):
                files[path.relative_to(root).as_posix()] = path
    return files


def _text_size_bytes(path: Path) -> int:
    """Size of a text file; 0 for what is binary, unreadable or not a regular file."""
    try:
        if not path.is_file():  # a FIFO would block in open()
            return 0
        with path.open("rb") as file:
            return 0 if b"\0" in file.read(_PROBE_BYTES) else os.fstat(file.fileno()).st_size
    except OSError:
        return 0


def _in_hash_order(documents: Sequence[Document]) -> tuple[Document, ...]:
    return tuple(sorted(documents, key=lambda document: (document.hash_words()[1], document.name)))


def _read(documents: Sequence[Document]) -> NDArray[np.uint8]:
    texts = []
    for document in documents:
        try:
            with document.path.open("rb") as file:
                file.seek(document.start)
                texts.append(file.read(document.num_bytes))
        except OSError as error:
            raise ConfigError(
                f"a file of the corpus must stay readable; {document.path}: {error.strerror}; restore it or start again"
            ) from None
    return np.frombuffer(SEPARATOR.join(texts), dtype=np.uint8)
