"""How text becomes token ids: its UTF-8 bytes, or a tokenizer file of the ``tokenizers`` package (extra ``demo``).

A tokenizer has a ``vocabulary`` (number of ids), a ``separator`` (the last of them, put behind every document), a
``fingerprint`` (equal means equal ids for equal text) and ``encode(bytes) -> int64[n]``.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["ByteTokenizer", "FileTokenizer", "Tokenizer", "load_tokenizer", "train_tokenizer"]


class Tokenizer(Protocol):
    @property
    def vocabulary(self) -> int: ...
    @property
    def separator(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def encode(self, text: bytes) -> NDArray[np.int64]: ...


class ByteTokenizer:
    """Each byte is a token; the separator is 256. Needs no file and no package."""

    vocabulary = 257
    separator = 256
    fingerprint = "bytes"

    def encode(self, text: bytes) -> NDArray[np.int64]:
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)


class FileTokenizer:
    """A ``tokenizer.json`` as the ``tokenizers`` package reads it; the separator is one id more than it has.

    Bytes that are not UTF-8 are replaced. No special tokens are added.

    Raises:
        ImportError: the package is missing.
        ValueError: the file is not a tokenizer.
    """

    def __init__(self, path: Path) -> None:
        tokenizers = import_tokenizers()
        content = path.read_text(encoding="utf-8")
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the package raises plain Exception
            raise ValueError(f"{str(path)!r} is not a tokenizer file: {error}") from error
        self.separator: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.vocabulary = self.separator + 1
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def encode(self, text: bytes) -> NDArray[np.int64]:
        encoding = self._tokenizer.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.int64)


def load_tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer of a file; None: bytes."""
    return ByteTokenizer() if path is None else FileTokenizer(path)


def train_tokenizer(paths: list[Path], destination: Path, vocabulary: int) -> None:
    """Write a ``tokenizer.json`` made from the text of ``paths``: byte pairs (Sennrich et al. 2016, section 3.2)."""
    tokenizers = import_tokenizers()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in paths)
    tokenizer.train_from_iterator(texts, trainer)
    destination.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(destination))


def import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as missing:
        raise ImportError("a tokenizer file needs the extra 'demo': pip install 'hp-nodes[demo]'") from missing
    return tokenizers
