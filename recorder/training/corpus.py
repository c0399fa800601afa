"""The toy corpus: real text in labelled domains, cut into readable tokens and seeded batches. No torch.

Shapes: B sequences in a batch, S tokens in a sequence, V vocabulary.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from recorder.training.texts import builtin_texts, user_texts

MIN_VOCAB_SIZE = 300
MAX_VOCAB_SIZE = 65_536
SAMPLE_CHARACTERS = 150_000
"""How much of each domain the vocabulary is learnt from, so that each has the same say in it."""

HELD_OUT_SHARE = 0.05
HELD_OUT_SEQUENCES = 8
"""A short domain holds out more than its share: up to this many sequences, at most a fifth of its tokens."""

_TRAIN, _PROBE = 0, 1
"""First part of the key that keeps the two kinds of random draws apart."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatch:
    """Sequences and where they come from.

    Attributes:
        token_ids: (B, S) int64, below the corpus' vocab_size.
        domain_ids: (B,) int64, indices into the corpus' domains.
    """

    token_ids: NDArray[np.int64]
    domain_ids: NDArray[np.int64]


class Corpus:
    """Tokens of every domain, a part of each held out; made by `build_corpus`.

    Attributes:
        domains: names, the built-in ones first; a batch's domain_ids index them.
        vocab_size: tokens in the vocabulary. It is what was asked for unless the text has too few
            different pieces to fill that.
    """

    def __init__(
        self,
        texts: Mapping[str, str],
        tokenizer: Tokenizer,
        seq_len: int,
        *,
        files: Mapping[str, str | Path] | None = None,
    ) -> None:
        """Tokenize the texts and hold out the end of each.

        Args:
            texts: domain name -> text.
            tokenizer: byte-level, as `train_tokenizer` makes it.
            seq_len: S, the length of sequence that every domain must be able to give.
            files: domain name -> the user's path, to name it where a domain is refused.

        Raises:
            ValueError: a domain is too short for one training and one held-out sequence.
        """
        self.domains = tuple(texts)
        self.vocab_size: int = tokenizer.get_vocab_size()
        self._tokenizer = tokenizer
        self._piece_V = _pieces(tokenizer)
        self._train: list[NDArray[np.int32]] = []
        self._held_out: list[NDArray[np.int32]] = []
        for domain, text in texts.items():
            ids = _encode(tokenizer, text)
            if len(ids) < 2 * seq_len:
                source = f"corpus {str(files[domain])!r}" if files and domain in files else f"domain {domain!r}"
                raise ValueError(
                    f"{source} has only {len(ids)} tokens: too short for one training and one "
                    f"held-out sequence of seq_len={seq_len}"
                )
            held_out = max(int(len(ids) * HELD_OUT_SHARE), min(HELD_OUT_SEQUENCES * seq_len, len(ids) // 5), seq_len)
            self._train.append(ids[:-held_out])
            self._held_out.append(ids[-held_out:])

    def batch(self, step: int, batch_size: int, seq_len: int, seed: int) -> TokenBatch:
        """A training batch: windows at random places of the domains' training parts.

        The domains take turns, sequence by sequence and on from batch to batch, so that each has its
        even share. The same arguments give the same batch, whatever was drawn before.

        Args:
            step: at least 0.
            batch_size: B, at least 1.
            seq_len: S, at least 1.
            seed: at least 0.

        Raises:
            ValueError: a number out of range, or a domain with fewer than seq_len training tokens.
        """
        step = _at_least(0, "step", step)
        batch_size = _at_least(1, "batch_size", batch_size)
        rng = _generator(seed, _TRAIN, step)
        domain_ids_B = (step * batch_size + np.arange(batch_size)) % len(self.domains)
        starts_B = rng.integers(0, self._room(self._train, seq_len)[domain_ids_B])
        return _windows(self._train, domain_ids_B, starts_B, seq_len)

    def probe_batch(self, batch_size: int, seq_len: int, seed: int) -> TokenBatch:
        """A fixed batch from the held-out ends of the domains, which `batch` never draws from.

        Sequences are ordered by domain, the domains' numbers of sequences differ by at most one (with
        fewer sequences than domains the last domains have none). A domain's sequences do not overlap,
        unless its held-out part is too short for so many.

        Args:
            batch_size: B, at least 1.
            seq_len: S, at least 1.
            seed: at least 0.

        Raises:
            ValueError: a number out of range, or a domain with fewer than seq_len held-out tokens.
        """
        batch_size = _at_least(1, "batch_size", batch_size)
        rng = _generator(seed, _PROBE, 0)
        room = self._room(self._held_out, seq_len)
        domain_ids_B = np.sort(np.arange(batch_size) % len(self.domains))
        starts = []
        for domain, count in enumerate(np.bincount(domain_ids_B, minlength=len(self.domains)).tolist()):
            whole_windows = len(self._held_out[domain]) // seq_len
            if count <= whole_windows:
                starts.append(np.sort(rng.choice(whole_windows, count, replace=False)) * seq_len)
            else:
                starts.append(np.linspace(0, room[domain] - 1, count).astype(np.int64))
        return _windows(self._held_out, domain_ids_B, np.concatenate(starts), seq_len)

    def token_texts(self, ids: ArrayLike) -> list[str]:
        """The readable piece of each token; the pieces of a sequence in a row are its text.

        Spaces and newlines are in the pieces. A token that is only a part of a multi-byte character has
        no text of its own: each such byte shows as its hexadecimal value, as in <0xE2>, and there alone
        the pieces in a row differ from the text.

        Args:
            ids: integers of any shape, 0 to vocab_size - 1.

        Returns:
            One string per id, in C order.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        flat = np.asarray(ids).ravel()
        if flat.size and not 0 <= flat.min() <= flat.max() < self.vocab_size:
            raise ValueError(f"token ids {flat.min()} to {flat.max()} must be from 0 to {self.vocab_size - 1}")
        return [self._piece_V[i] for i in flat.tolist()]

    def encode(self, text: str) -> NDArray[np.int64]:
        """Token ids (N,) int64 of a text; every text has some, as single bytes are in the vocabulary."""
        return _encode(self._tokenizer, text).astype(np.int64)

    def digest(self) -> str:
        """A hash of all tokens and of what they stand for: two corpora that share it give the same batches."""
        sha = hashlib.sha256()
        for name, train, held_out in zip(self.domains, self._train, self._held_out, strict=True):
            sha.update(f"{name}\0{len(train)}\0{len(held_out)}\0".encode())
            sha.update(train.tobytes())
            sha.update(held_out.tobytes())
        sha.update("\0".join(self._piece_V).encode(errors="surrogatepass"))
        return sha.hexdigest()

    def _room(self, parts: list[NDArray[np.int32]], seq_len: int) -> NDArray[np.int64]:
        """How many windows start in each domain's part, (domains,)."""
        seq_len = _at_least(1, "seq_len", seq_len)
        room = np.array([len(part) for part in parts], dtype=np.int64) - seq_len + 1
        if room.min() < 1:
            shortest = int(room.argmin())
            raise ValueError(
                f"seq_len={seq_len} is more than domain {self.domains[shortest]!r} has here, "
                f"{len(parts[shortest])} tokens"
            )
        return room


def build_corpus(paths: Iterable[str | Path] = (), *, vocab_size: int = 1024, seed: int = 0, seq_len: int) -> Corpus:
    """Gather the text, learn the vocabulary and tokenize: a few seconds.

    Domains are code, prose, arithmetic and data, then the user's (see `recorder.training.texts`). The
    same arguments, files and versions of Python and tokenizers give the same corpus. The vocabulary is
    learnt from an equal share of every domain, held-out ends included.

    Args:
        paths: the user's files and folders, a domain each.
        vocab_size: tokens to learn, 300 to 65536.
        seed: of the generated domains and of the vocabulary's sample, at least 0.
        seq_len: the longest sequence that will be asked for, in tokens.

    Raises:
        ValueError: a number out of range, a path that gives no text, or a domain too short for one
            training and one held-out sequence.
    """
    if isinstance(paths, str):
        raise ValueError(f"paths={paths!r} must be a list of paths")
    vocab_size = _at_least(MIN_VOCAB_SIZE, "vocab_size", vocab_size, "256 entries are single bytes")
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size={vocab_size} must be at most {MAX_VOCAB_SIZE} for a corpus of this size")
    seed = _at_least(0, "seed", seed)
    seq_len = _at_least(1, "seq_len", seq_len)
    paths = list(paths)
    texts = builtin_texts(seed)
    added = user_texts(paths, taken=texts)
    texts |= added
    tokenizer = train_tokenizer(texts, vocab_size=vocab_size, seed=seed)
    return Corpus(texts, tokenizer, seq_len, files=dict(zip(added, paths, strict=True)))


def train_tokenizer(texts: Mapping[str, str], *, vocab_size: int, seed: int) -> Tokenizer:
    """Learn a byte-level BPE from an equal, seeded sample of every domain.

    Args:
        texts: domain name -> text.
        vocab_size: V, the 256 bytes counted.
        seed: of the sample.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        # Sorted: the library lists its alphabet in no fixed order, and ids follow that order.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=16,  # no entry wasted on a ruler of 70 dashes
    )
    rng = random.Random(f"vocabulary {seed}")
    tokenizer.train_from_iterator(_sample(texts.values(), rng), trainer)
    return tokenizer


def _sample(texts: Iterable[str], rng: random.Random) -> Iterator[str]:
    for text in texts:
        slices = list(_slices(text, 4096))
        rng.shuffle(slices)
        left = SAMPLE_CHARACTERS
        for piece in slices:
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                break


def _slices(text: str, length: int) -> Iterator[str]:
    """The text in pieces of about this length, cut after a line's end where there is one."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + length - 1, start + 2 * length) + 1 or start + length
        yield text[start:end]
        start = end


def _encode(tokenizer: Tokenizer, text: str) -> NDArray[np.int32]:
    slices = list(_slices(text, 16_384))
    ids = [np.empty(0, np.int32)]
    # The tokenizer works on a group of slices side by side. A megabyte at a time, as what it hands back
    # takes dozens of times the memory of its text.
    for first in range(0, len(slices), 64):
        encodings = tokenizer.encode_batch_fast(slices[first : first + 64])
        ids += [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]
    return np.concatenate(ids)


def _pieces(tokenizer: Tokenizer) -> list[str]:
    """Each token's bytes as text, (V,)."""
    byte_of = _byte_of_character()
    pieces = []
    for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        # surrogateescape maps a byte that is no UTF-8 to U+DC00 + byte, which no valid text holds.
        text = bytes(byte_of[character] for character in token).decode("utf-8", "surrogateescape")
        pieces.append("".join(f"<0x{ord(c) - 0xDC00:02X}>" if "\udc80" <= c <= "\udcff" else c for c in text))
    return pieces


def _byte_of_character() -> dict[str, int]:
    """Byte-level tokens write each byte as one printable character: that character -> the byte.

    Source: the byte encoder of GPT-2. Printable Latin-1 characters stand for themselves, all other bytes,
    in order, for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _windows(
    parts: list[NDArray[np.int32]], domain_ids_B: NDArray[np.int64], starts_B: NDArray[np.int64], seq_len: int
) -> TokenBatch:
    sequences = [
        parts[domain][start : start + seq_len]
        for domain, start in zip(domain_ids_B.tolist(), starts_B.tolist(), strict=True)
    ]
    return TokenBatch(token_ids=np.stack(sequences).astype(np.int64), domain_ids=domain_ids_B)


def _generator(seed: int, kind: int, step: int) -> np.random.Generator:
    seed = _at_least(0, "seed", seed)
    return np.random.default_rng(np.random.SeedSequence(entropy=seed, spawn_key=(kind, step)))


def _at_least(least: int, name: str, value: int, why: str = "") -> int:
    """The value as an int, or a ValueError that names it and the least that is allowed."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} must be a whole number") from None
    if number < least:
        raise ValueError(f"{name}={number} must be at least {least}" + (f": {why}" if why else ""))
    return number
