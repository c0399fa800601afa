"""The toy corpus: its texts, its tokens, its batches, and what it refuses."""

import csv
import errno
import hashlib
import io
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorder.training import texts as corpus_texts
from recorder.training.corpus import Corpus, TokenBatch, build_corpus, train_tokenizer

SEQ_LEN = 64

DIGEST = """
import hashlib
from recorder.training.corpus import build_corpus
corpus = build_corpus(seq_len=64, seed=3)
digest = hashlib.sha256()
for step in (5, 0, 17):
    digest.update(corpus.batch(step, 10, 64, 1).token_ids.tobytes())
digest.update(corpus.probe_batch(9, 64, 1).token_ids.tobytes())
digest.update("|".join(corpus.token_texts(range(corpus.vocab_size))).encode())
print(digest.hexdigest())
"""


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return build_corpus(seq_len=SEQ_LEN, seed=3)


@pytest.fixture(scope="module")
def numbered() -> Corpus:
    """Two domains whose every line is its own number, so that a window tells where it was drawn."""
    texts = {
        "a": "".join(f"a{i:05}\n" for i in range(6000)),
        "b": "".join(f"b{i:05}\n" for i in range(3000)),
    }
    return Corpus(texts, train_tokenizer(texts, vocab_size=400, seed=0), SEQ_LEN)


def text_of(corpus: Corpus, batch: TokenBatch) -> list[str]:
    return ["".join(corpus.token_texts(row)) for row in batch.token_ids]


def as_bytes(pieces: list[str]) -> bytes:
    """Pieces back to bytes, the way the docstring describes them."""
    parts = re.split("<0x([0-9A-F]{2})>", "".join(pieces))
    return b"".join(bytes.fromhex(part) if i % 2 else part.encode() for i, part in enumerate(parts))


class TestBuiltinTexts:
    def test_sizes_and_names(self) -> None:
        texts = corpus_texts.builtin_texts(0)
        assert list(texts) == ["code", "prose", "arithmetic", "data"]
        assert 0.7e6 < len(texts["code"]) < 1.5e6
        assert all(len(text) > 4e5 for text in texts.values())

    def test_code_is_python(self) -> None:
        code = corpus_texts.stdlib_code()
        assert "class ArgumentParser(" in code
        assert "class WeakValueDictionary(" in code

    def test_prose_is_the_language_reference(self) -> None:
        assert 'The "with" statement is used to wrap the execution of a block' in corpus_texts.language_reference()

    def test_every_expression_is_correct(self) -> None:
        expressions = corpus_texts.builtin_texts(0)["arithmetic"].rstrip("\n").replace("\n", "; ").split("; ")
        assert len(expressions) > 10_000
        for expression in expressions:
            left, right = expression.split("=")
            assert re.fullmatch(r"\d+([-+*]\d+){1,3}", left)
            assert eval(re.sub(r"\b0+(?=\d)", "", left)) == int(right), expression
        operators = Counter("".join(expressions))
        assert all(operators[symbol] > 1000 for symbol in "+-*")
        assert {len(re.findall(r"\d+", e)) for e in expressions} == {3, 4, 5}

    def test_all_data_can_be_parsed(self) -> None:
        forms: Counter[str] = Counter()
        for block in corpus_texts.builtin_texts(0)["data"].strip("\n").split("\n\n"):
            if block.startswith("["):
                forms["array"] += 1
                records = json.loads(block)
            elif block.startswith("{"):
                forms["lines"] += 1
                records = [json.loads(line) for line in block.split("\n")]
            else:
                forms["csv"] += 1
                records = list(csv.DictReader(io.StringIO(block)))
                assert all(None not in record and None not in record.values() for record in records)
            assert 3 <= len(records) <= 12
            assert len({tuple(record) for record in records}) == 1
        assert min(forms.values()) > 100
        assert len(forms) == 3

    def test_seed_changes_what_is_generated_only(self) -> None:
        first, same, other = (corpus_texts.builtin_texts(seed) for seed in (0, 0, 1))
        assert first == same
        assert [first[name] == other[name] for name in first] == [True, True, False, False]

    def test_a_python_without_sources_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(corpus_texts.sysconfig, "get_path", lambda _: str(tmp_path))
        with pytest.raises(ValueError, match="no standard library sources"):
            corpus_texts.stdlib_code()
        monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
        with pytest.raises(ValueError, match=r"pydoc_data\.topics"):
            corpus_texts.language_reference()


class TestTokens:
    def test_vocabulary(self, corpus: Corpus) -> None:
        assert corpus.vocab_size == 1024
        pieces = corpus.token_texts(range(corpus.vocab_size))
        assert len(set(pieces)) == 1024
        # Words, not bytes, from every domain; whitespace in the piece.
        assert {" the", "self", " return", '":', ' "', "12", "=-"} <= set(pieces)
        assert any(re.fullmatch("\n {3,}", piece) for piece in pieces)

    def test_pieces_of_a_domain_give_back_its_text(self, corpus: Corpus) -> None:
        for name, text in corpus_texts.builtin_texts(3).items():
            start = text[:50_000]
            pieces = corpus.token_texts(corpus.encode(start))
            assert as_bytes(pieces) == start.encode(), name
            assert len(pieces) < 0.8 * len(start), name

    @given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60).filter(lambda text: "<0x" not in text))
    def test_pieces_give_back_any_text(self, numbered: Corpus, text: str) -> None:
        assert as_bytes(numbered.token_texts(numbered.encode(text))) == text.encode()

    def test_part_of_a_character_shows_as_bytes(self, numbered: Corpus) -> None:
        assert numbered.token_texts(numbered.encode("é→")) == ["<0xC3>", "<0xA9>", "<0xE2>", "<0x86>", "<0x92>"]

    def test_whole_multibyte_pieces_are_readable(self) -> None:
        texts = {"greek": "λόγος και λόγος\n" * 200}
        corpus = Corpus(texts, train_tokenizer(texts, vocab_size=320, seed=0), 16)
        assert "".join(corpus.token_texts(corpus.encode("λόγος και λόγος"))) == "λόγος και λόγος"

    def test_any_shape_of_ids_in_order(self, numbered: Corpus) -> None:
        ids = numbered.encode("a00001\nb00002\n")[:6].reshape(2, 3)
        assert numbered.token_texts(ids) == numbered.token_texts(ids[0]) + numbered.token_texts(ids[1])
        assert numbered.token_texts([]) == []

    @pytest.mark.parametrize("ids", [[-1], [0, 1024], [[0], [5000]]])
    def test_unknown_ids_are_refused(self, corpus: Corpus, ids: list) -> None:
        with pytest.raises(ValueError, match="must be from 0 to 1023"):
            corpus.token_texts(ids)

    def test_every_domain_shapes_the_vocabulary(self, tmp_path: Path) -> None:
        rng = random.Random(0)
        letters = "abcdefghijklmnopqrstuvwxyz"
        (tmp_path / "own.txt").write_text(
            "\n".join(" quixotic" + rng.choice(letters) for _ in range(20_000)), encoding="utf-8"
        )
        added = build_corpus([tmp_path / "own.txt"], seq_len=SEQ_LEN)
        assert " quixotic" in added.token_texts(range(added.vocab_size))


class TestBatches:
    def test_shapes_and_range(self, corpus: Corpus) -> None:
        batch = corpus.batch(0, 10, SEQ_LEN, 0)
        assert (batch.token_ids.shape, batch.domain_ids.shape) == ((10, SEQ_LEN), (10,))
        assert batch.token_ids.dtype == batch.domain_ids.dtype == np.int64
        assert batch.token_ids.min() >= 0
        assert batch.token_ids.max() < corpus.vocab_size

    def test_the_label_is_the_text_s_domain(self, numbered: Corpus) -> None:
        for batch in (numbered.batch(3, 7, SEQ_LEN, 0), numbered.probe_batch(7, SEQ_LEN, 0)):
            for text, domain in zip(text_of(numbered, batch), batch.domain_ids, strict=True):
                assert set(re.findall("[a-z]", text)) == {numbered.domains[domain]}

    @pytest.mark.parametrize("batch_size", [1, 3, 4, 6, 16])
    def test_domains_share_evenly_and_the_remainder_rotates(self, corpus: Corpus, batch_size: int) -> None:
        total: Counter[int] = Counter()
        for step in range(8):
            counts = np.bincount(corpus.batch(step, batch_size, 8, 0).domain_ids, minlength=4)
            assert counts.max() - counts.min() <= 1
            total.update({domain: int(count) for domain, count in enumerate(counts)})
        assert set(total.values()) == {2 * batch_size}

    def test_a_batch_does_not_depend_on_what_was_drawn_before(self, corpus: Corpus) -> None:
        first = corpus.batch(7, 8, SEQ_LEN, 0).token_ids
        corpus.batch(1, 3, 5, 2)
        corpus.probe_batch(5, 16, 0)
        np.testing.assert_array_equal(corpus.batch(7, 8, SEQ_LEN, 0).token_ids, first)
        assert not np.array_equal(corpus.batch(8, 8, SEQ_LEN, 0).token_ids, first)
        assert not np.array_equal(corpus.batch(7, 8, SEQ_LEN, 1).token_ids, first)

    def test_training_reaches_everything_but_what_is_held_out(self, numbered: Corpus) -> None:
        def lines(texts: list[str]) -> set[str]:
            return set(re.findall(r"[ab]\d{5}", "\n".join(texts)))

        trained, probed = set(), set()
        for step in range(300):
            trained |= lines(text_of(numbered, numbered.batch(step, 32, SEQ_LEN, 0)))
        for seed in range(40):
            probed |= lines(text_of(numbered, numbered.probe_batch(16, SEQ_LEN, seed)))
        for letter, count in (("a", 6000), ("b", 3000)):
            last_trained = max(line for line in trained if line[0] == letter)
            first_probed = min(line for line in probed if line[0] == letter)
            assert last_trained < first_probed
            held_out = count - int(first_probed[1:])
            assert 0.03 * count < held_out < 0.07 * count
            assert len([line for line in trained if line[0] == letter]) > 0.99 * int(last_trained[1:])

    def test_probe_is_fixed_ordered_and_without_overlap(self, numbered: Corpus) -> None:
        probe = numbered.probe_batch(9, SEQ_LEN, 0)
        assert probe.domain_ids.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
        np.testing.assert_array_equal(numbered.probe_batch(9, SEQ_LEN, 0).token_ids, probe.token_ids)
        lines = re.findall(r"[ab]\d{5}\n", "\n".join(text_of(numbered, probe)))
        assert len(lines) == len(set(lines))

    def test_a_short_domain_gives_as_many_probe_sequences_as_it_can(self) -> None:
        texts = {"short": "".join(f"{i:04} " for i in range(300))}
        corpus = Corpus(texts, train_tokenizer(texts, vocab_size=300, seed=0), 100)
        probe = corpus.probe_batch(12, 100, 0)
        assert probe.token_ids.shape == (12, 100)
        held_out = set("".join(text_of(corpus, probe)).split())
        trained = set()
        for step in range(50):
            trained |= set(re.findall(r"\d{4}", " ".join(text_of(corpus, corpus.batch(step, 4, 100, 0)))))
        assert not trained & {word for word in held_out if len(word) == 4}

    @pytest.mark.parametrize("tokens", [200, 201, 399, 1000])
    def test_two_sequences_are_enough_for_a_domain(self, tokens: int) -> None:
        counting = "".join(f"{i} " for i in range(5000))
        tokenizer = train_tokenizer({"all": counting}, vocab_size=300, seed=0)
        long = Corpus({"all": counting}, tokenizer, 1)
        text = "".join(long.token_texts(long.encode(counting)[:tokens]))
        corpus = Corpus({"all": text}, tokenizer, 100)
        assert corpus.batch(0, 3, 100, 0).token_ids.shape == (3, 100)
        assert corpus.probe_batch(3, 100, 0).token_ids.shape == (3, 100)
        with pytest.raises(ValueError, match=f"domain 'all' has only {tokens} tokens"):
            Corpus({"all": text}, tokenizer, tokens // 2 + 1)

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ((-1, 4, 8, 0), "step=-1"),
            ((0, 0, 8, 0), "batch_size=0"),
            ((0, 4, 0, 0), "seq_len=0"),
            ((0, 4, 8, -1), "seed=-1"),
            ((0, 4, 8.5, 0), r"seq_len=8\.5"),
            ((0, 4, 10**6, 0), "seq_len=1000000 is more than domain 'b' has"),
        ],
    )
    def test_bad_numbers_are_named(self, numbered: Corpus, arguments: tuple, named: str) -> None:
        with pytest.raises(ValueError, match=named):
            numbered.batch(*arguments)
        if arguments[0] == 0:
            with pytest.raises(ValueError, match=named):
                numbered.probe_batch(*arguments[1:])

    def test_same_seed_same_corpus_whatever_the_hash_seed_and_locale(self, corpus: Corpus) -> None:
        expected = hashlib.sha256()
        for step in (17, 0, 5):
            corpus.batch(step, 10, 64, 1)
        for step in (5, 0, 17):
            expected.update(corpus.batch(step, 10, 64, 1).token_ids.tobytes())
        expected.update(corpus.probe_batch(9, 64, 1).token_ids.tobytes())
        expected.update("|".join(corpus.token_texts(range(corpus.vocab_size))).encode())
        environment = os.environ | {
            "PYTHONHASHSEED": "12345",
            "LC_ALL": "C",
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
            "RAYON_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected.hexdigest()


class TestUserTexts:
    def read(self, *paths: Path | str) -> dict[str, str]:
        return corpus_texts.user_texts(paths, taken=("code", "prose", "arithmetic", "data"))

    def test_one_domain_per_file_or_folder_and_no_silent_merge(self, tmp_path: Path) -> None:
        for name in ("one", "two", "code"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "notes.txt").write_text(f"from {name}", encoding="utf-8")
        paths = [tmp_path / "one/notes.txt", tmp_path / "two/notes.txt", tmp_path / "code", tmp_path / "one/notes.txt"]
        assert self.read(*paths) == {
            "notes": "from one",
            "notes-2": "from two",
            "code-2": "from code",
            "notes-3": "from one",
        }

    def test_names_like_a_suffix_do_not_clash(self, tmp_path: Path) -> None:
        for name in ("data-2.csv", "data.csv", "d3e.v1.txt"):
            (tmp_path / name).write_text(name, encoding="utf-8")
        read = self.read(tmp_path / "data-2.csv", tmp_path / "data.csv", tmp_path / "d3e.v1.txt")
        assert read == {"data-2": "data-2.csv", "data-3": "data.csv", "d3e.v1": "d3e.v1.txt"}

    def test_folders_named_by_dots(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "v1.2" / "sub").mkdir(parents=True)
        (tmp_path / "v1.2" / "a.txt").write_text("text", encoding="utf-8")
        monkeypatch.chdir(tmp_path / "v1.2" / "sub")
        assert self.read("..") == {"v1.2": "text"}
        monkeypatch.chdir(tmp_path / "v1.2")
        assert self.read(".", "a.txt") == {"v1.2": "text", "a": "text"}

    def test_folder_reads_text_in_sorted_order_and_passes_over_the_rest(self, tmp_path: Path) -> None:
        folder = tmp_path / "mine"
        for name, content in {
            "b.txt": b"second",
            "a.md": b"first",
            "c/d.txt": b"third",
            "c/e/f": "vierte Zeile, größer".encode(),
            ".hidden": b"no",
            ".git/config": b"no",
            "c/.x/y.txt": b"no",
            "image.png": b"\x89PNG\0\0",
            "late-nul": b"x" * 20_000 + b"\0",
            "latin1.txt": "größer".encode("latin-1"),
            "empty.txt": b" \n",
        }.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        (folder / "gone.txt").symlink_to(tmp_path / "nowhere")
        (folder / "loop").symlink_to(folder)
        assert self.read(folder) == {"mine": "first\nsecond\nthird\nvierte Zeile, größer"}

    def test_line_ends_and_byte_order_mark(self, tmp_path: Path) -> None:
        (tmp_path / "dos.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
        assert self.read(tmp_path / "dos.txt") == {"dos": "one\ntwo\nthree\n"}

    @pytest.mark.parametrize(
        ("content", "named"),
        [
            pytest.param(None, "does not exist", id="missing"),
            pytest.param(b"", "is empty", id="empty"),
            pytest.param(b" \n\t", "is empty", id="blank"),
            pytest.param(b"abc\0def", "is binary or not UTF-8", id="nul"),
            pytest.param(b"x" * 9000 + b"\0", "is binary or not UTF-8", id="late-nul"),
            pytest.param("größer".encode("latin-1"), "is binary or not UTF-8", id="latin-1"),
            pytest.param("text".encode("utf-16"), "is binary or not UTF-8", id="utf-16"),
        ],
    )
    def test_refused_files_are_named_in_one_line(self, tmp_path: Path, content: bytes | None, named: str) -> None:
        path = tmp_path / "refused.txt"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=named) as caught:
            self.read(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_unreadable_files_are_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # By a stand-in for the system's refusal: tests may run as root, whom no mode bits stop.
        path = tmp_path / "secret.txt"
        path.write_text("text", encoding="utf-8")

        def refuse(self: Path, *_: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))

        monkeypatch.setattr(Path, "open", refuse)
        for given_path in (path, tmp_path):
            with pytest.raises(ValueError, match=r"secret\.txt' cannot be read: Permission denied"):
                self.read(given_path)

    def test_neither_file_nor_folder(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ValueError, match="pipe' is neither a file nor a folder"):
            self.read(tmp_path / "pipe")

    def test_folder_without_text(self, tmp_path: Path) -> None:
        (tmp_path / ".hidden").write_text("text", encoding="utf-8")
        (tmp_path / "x.bin").write_bytes(b"\0")
        with pytest.raises(ValueError, match="has no text files"):
            self.read(tmp_path)

    def test_too_large(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(corpus_texts, "MAX_DOMAIN_BYTES", 2**20)
        for name in ("a.txt", "b.txt"):
            (tmp_path / name).write_text("x" * 600_000, encoding="utf-8")
        assert len(self.read(tmp_path / "a.txt")["a"]) == 600_000
        with pytest.raises(ValueError, match="has more than 1 MiB"):
            self.read(tmp_path)


class TestBuildCorpus:
    def test_user_domains_come_after_the_built_in_ones(self, tmp_path: Path) -> None:
        for name in ("prose", "poems"):
            (tmp_path / f"{name}.txt").write_text("Roses are red, violets are blue.\n" * 200, encoding="utf-8")
        corpus = build_corpus([str(tmp_path / "prose.txt"), tmp_path / "poems.txt"], seq_len=32)
        assert corpus.domains == ("code", "prose", "arithmetic", "data", "prose-2", "poems")
        assert corpus.probe_batch(6, 32, 0).domain_ids.tolist() == [0, 1, 2, 3, 4, 5]
        last = text_of(corpus, corpus.probe_batch(6, 32, 0))[-1]
        assert last in "Roses are red, violets are blue.\n" * 200

    def test_too_short_for_a_sequence_names_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "short.txt"
        path.write_text("Roses are red.", encoding="utf-8")
        with pytest.raises(ValueError, match=r"short\.txt' has only \d+ tokens: too short .* seq_len=32"):
            build_corpus([path], seq_len=32)

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ({"vocab_size": 299}, "vocab_size=299 must be at least 300: 256 entries are single bytes"),
            ({"vocab_size": 70_000}, "vocab_size=70000 must be at most 65536"),
            ({"vocab_size": "many"}, "vocab_size='many' must be a whole number"),
            ({"seed": -1}, "seed=-1 must be at least 0"),
            ({"seq_len": 0}, "seq_len=0 must be at least 1"),
            ({"paths": "notes.txt"}, "paths='notes.txt' must be a list"),
        ],
    )
    def test_bad_arguments_are_named(self, arguments: dict, named: str) -> None:
        with pytest.raises(ValueError, match=named):
            build_corpus(**({"seq_len": 64} | arguments))

    def test_loads_no_torch(self) -> None:
        code = "import sys, recorder.training.corpus; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
