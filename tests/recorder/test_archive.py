"""A run as one zip, out and in again; and zips that are no such thing, which must leave nothing behind."""

import io
import json
import random
import shutil
import signal
import stat
import struct
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from toy_runs import layer as moe_layer
from toy_runs import log_stats, model

from recorder import archive, cli
from recorder.about import make_about, read_about, write_about
from recorder.archive import ArchiveError, export_zip, import_zip
from recorder.manifest import RunExistsError
from recorder.reader import Run, list_runs
from recorder.writer import RunWriter


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with a note, some counts, and files that are not a run's."""
    folder = tmp_path_factory.mktemp("runs")
    with RunWriter(folder / "first", manifest={"name": "First"} | model(moe_layer(1, 0, 2, top_k=1))) as writer:
        for step in range(3):
            writer.log_step(step, tokens=4, loss=1.0)
            log_stats(writer, step, layer=1)
    write_about(writer.path, make_about(notes="a note", tags="kept"))
    (writer.path / "analysis" / "partials").mkdir(parents=True)
    for name in ("analysis/loads.parquet", "analysis/partials/stats-0.parquet"):
        pq.write_table(pa.table({"x": [1]}), writer.path / name)
    for name in ("checkpoint.pt", ".run.json.1.tmp", "steps/.part-r00000-000009.parquet.1.tmp", "steps/readme.txt"):
        (writer.path / name).write_text("not the run's")
    return writer.path


@pytest.fixture(scope="module")
def zipped(run):
    target = run.parent / "first.zip"
    export_zip(run, target)
    return target


def files(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def of_the_run(path):
    return {name: content for name, content in files(path).items() if b"not the run's" not in content}


def test_out_and_in_again_is_the_same_run_byte_for_byte(run, zipped, tmp_path):
    imported = import_zip(zipped, tmp_path / "in")
    assert imported.path == tmp_path / "in" / "first"
    assert files(imported.path) == of_the_run(run)
    assert list((tmp_path / "in").iterdir()) == [imported.path]
    assert (imported.report.problems, imported.report.status) == ((), "finished")
    assert Run(imported.path).load(1).tolist() == Run(run).load(1).tolist() == [[3, 1]] * 3
    assert read_about(imported.path).notes == "a note"


def test_the_zip_is_one_folder_the_same_every_time_and_any_tool_reads_it(run, zipped, tmp_path):
    names = zipfile.ZipFile(zipped).namelist()
    assert sorted(names) == sorted(f"first/{name}" for name in of_the_run(run))
    assert zipfile.ZipFile(zipped).testzip() is None
    again = io.BytesIO()
    export_zip(run, again)
    assert again.getvalue() == zipped.read_bytes()
    assert archive.contents_of(run).size == sum(map(len, of_the_run(run).values()))


def test_a_taken_name_gets_a_number_and_run_json_follows(zipped, tmp_path):
    paths = [import_zip(zipped, tmp_path, name=name).path for name in ("", "Second", "")]
    assert [path.name for path in paths] == ["first", "first-2", "first-3"]
    assert [json.loads((path / "run.json").read_text())["run_id"] for path in paths] == [path.name for path in paths]
    assert [(info.run_id, info.name) for info in list_runs(tmp_path)] == [
        ("first", "First"),
        ("first-2", "Second"),
        ("first-3", "First"),
    ]
    assert read_about(paths[1]).notes == "a note"


def test_an_existing_file_is_not_overwritten(run, tmp_path):
    target = tmp_path / "mine.zip"
    target.write_text("mine")
    with pytest.raises(FileExistsError, match=r"mine\.zip is there already"):
        export_zip(run, target)
    assert target.read_text() == "mine"


def test_a_run_that_is_being_written_is_not_exported(tmp_path):
    writer = RunWriter(tmp_path / "live")
    with pytest.raises(RunExistsError, match="live is still being written; export it when it has ended"):
        export_zip(writer.path, tmp_path / "live.zip")
    writer.finalize()
    export_zip(writer.path, tmp_path / "live.zip")
    assert list(tmp_path.glob("*.tmp")) == []


def test_from_an_object_store(s3, tmp_path):
    with RunWriter(f"{s3}/runs/far") as writer:
        writer.log_step(0, tokens=4, loss=2.5)
    export_zip(f"{s3}/runs/far", tmp_path / "far.zip")
    imported = import_zip(tmp_path / "far.zip", tmp_path)
    assert Run(imported.path).steps()["loss"].tolist() == [2.5]
    assert not imported.report.problems


def test_a_damaged_part_is_told_and_the_rest_is_taken(run, tmp_path):
    broken = shutil.copytree(run, tmp_path / "broken")
    part = next((broken / "layer_stats").glob("part-*"))
    part.write_bytes(part.read_bytes()[:-1])
    export_zip(broken, tmp_path / "broken.zip")
    imported = import_zip(tmp_path / "broken.zip", tmp_path / "in")
    assert [problem.file for problem in imported.report.problems][:1] == [f"layer_stats/{part.name}"]
    assert len(Run(imported.path).steps()) == 3


# ------------------------------------------------------------------------------------------------- zips of others


def rezipped(zipped, change):
    """The zip with its entries changed: `change` gets a dict of name -> (ZipInfo, content) to work on."""
    with zipfile.ZipFile(zipped) as source:
        entries = {info.filename: (info, source.read(info)) for info in source.infolist()}
    change(entries)
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as made:
        for info, content in entries.values():
            made.writestr(info, content)
    return target


def add(name, content=b"x", mode=None, key=None):
    def change(entries):
        info = zipfile.ZipInfo(name)
        if mode is not None:
            info.external_attr = mode << 16
        entries[key or name] = (info, content)

    return change


def drop(name):
    return lambda entries: entries.pop(name)


def run_json(**values):
    def change(entries):
        info, content = entries["first/run.json"]
        entries["first/run.json"] = (info, json.dumps(json.loads(content) | values).encode())

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(add("../escape.parquet"), "'../escape.parquet' in the zip is no file of a run", id="up"),
        pytest.param(add("first/steps/../../../x.parquet"), "is no file of a run", id="up from inside"),
        pytest.param(add("first/steps/..parquet"), "is no file of a run", id="dots"),
        pytest.param(add("/etc/cron.d/x.parquet"), "is no file of a run", id="absolute"),
        pytest.param(add("first/steps/a\\..\\..\\x.parquet"), "is no file of a run", id="backslashes"),
        pytest.param(add("C:/x.parquet"), "is no file of a run", id="drive"),
        pytest.param(add("first/steps/C:x.parquet"), "is no file of a run", id="drive inside"),
        pytest.param(add("first/model.pt"), "'first/model.pt' in the zip is no file of a run", id="pickle"),
        pytest.param(add("first/steps/x.py"), "is no file of a run", id="script"),
        pytest.param(add("first/.jobs/x.json"), "is no file of a run", id="hidden"),
        pytest.param(add("first/steps/_hidden.parquet"), "is no file of a run", id="hidden part"),
        pytest.param(add("second/run.json"), "holds several runs", id="two runs"),
        pytest.param(add("other/steps/x.parquet"), "is no file of a run", id="beside the run"),
        pytest.param(
            add("first/steps/x.parquet", b"/etc/passwd", stat.S_IFLNK | 0o777),
            "is a link or a special file",
            id="link",
        ),
        pytest.param(add("first/steps/x.parquet", b"", stat.S_IFIFO | 0o644), "a link or a special file", id="pipe"),
        pytest.param(add("first/RUN.json"), "is no file of a run", id="another case"),
        pytest.param(
            lambda entries: [add("first/events/A.parquet")(entries), add("first/events/a.parquet")(entries)],
            "is in the zip twice",
            id="twice but for case",
        ),
        pytest.param(
            add("first/run.json", b"{}", key="again"),
            "is in the zip twice",
            id="two run.json",
            marks=pytest.mark.filterwarnings("ignore:Duplicate name"),
        ),
        pytest.param(drop("first/run.json"), "holds no run: there is no run.json", id="no run.json"),
        pytest.param(lambda entries: entries.clear(), "holds no run", id="empty"),
        pytest.param(add("first/run.json", b"{"), "run.json is not JSON", id="no JSON"),
        pytest.param(run_json(format_version=99), "format_version 99", id="newer format"),
        pytest.param(run_json(model=[1]), "does not list the model's layers", id="odd manifest"),
        pytest.param(
            run_json(status="running", heartbeat_at="2999-01-01T00:00:00+00:00"),
            "says that the run is still being written",
            id="running for ever",
        ),
    ],
)
def test_what_no_run_holds_is_refused_and_nothing_is_left(zipped, tmp_path, change, message):
    out = tmp_path / "deep" / "in"
    out.mkdir(parents=True)
    with pytest.raises(ArchiveError, match=message) as caught:
        import_zip(rezipped(zipped, change), out)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)
    assert list(tmp_path.rglob("*")) == [tmp_path / "deep", out]


def test_a_zip_without_a_folder_and_one_from_a_mac_are_taken(zipped, tmp_path):
    def flat(entries):
        for name, (info, _) in list(entries.items()):
            info.filename = name.removeprefix("first/")
        add("__MACOSX/._run.json")(entries)
        add(".DS_Store")(entries)

    file = tmp_path / "my run (1).zip"
    file.write_bytes(rezipped(zipped, flat).getvalue())
    assert import_zip(file, tmp_path / "in").path.name == "my-run-1"
    assert not list((tmp_path / "in").rglob("*DS_Store"))


@pytest.mark.parametrize("folder", ["...", "-rf", "a b\tc", "x" * 300, "\N{SNOWMAN}"])
def test_odd_folder_names_become_plain_ones(zipped, tmp_path, folder):
    def move(entries):
        for name, (info, _) in entries.items():
            info.filename = name.replace("first/", f"{folder}/")

    path = import_zip(rezipped(zipped, move), tmp_path).path
    assert path.parent == tmp_path
    assert path.name in ("run", "rf", "a-b-c", "x" * 100)
    assert json.loads((path / "run.json").read_text())["run_id"] == path.name


def test_bombs_are_refused_before_a_byte_is_unpacked(zipped, tmp_path):
    def bomb(entries):
        info = zipfile.ZipInfo("first/steps/x.parquet")
        info.compress_type = zipfile.ZIP_DEFLATED
        entries["bomb"] = (info, bytes(30_000_000))

    big = rezipped(zipped, bomb)
    assert len(big.getvalue()) < 100_000
    with pytest.raises(ArchiveError, match=r"unpacks to 30\.0 MB; at most 20\.0 MB"):
        import_zip(big, tmp_path, most_bytes=20_000_000)
    # one that lies about its size gives no more than it declares, and its checksum does not fit
    lying = big.getvalue().replace(struct.pack("<I", 30_000_000), struct.pack("<I", 1000))
    with pytest.raises(ArchiveError, match="no sound zip file"):
        import_zip(io.BytesIO(lying), tmp_path, most_bytes=20_000_000)
    wide = io.BytesIO()
    pq.write_table(pa.table({"step": [0], "text": ["a" * 30_000_000]}), wide, compression="zstd")
    with pytest.raises(ArchiveError, match=r"decompress to 30\.\d MB; at most 20\.0 MB"):
        import_zip(rezipped(zipped, add("first/events/x.parquet", wide.getvalue())), tmp_path, most_bytes=20_000_000)
    assert list(tmp_path.iterdir()) == []


def test_json_that_fills_memory_is_refused(zipped, tmp_path):
    with pytest.raises(ArchiveError, match=r"'first/run\.json' has 17,000,000 bytes; at most 16,777,216"):
        import_zip(rezipped(zipped, add("first/run.json", bytes(17_000_000))), tmp_path)


def test_damaged_zips_are_one_line_or_a_run(zipped, tmp_path):
    whole = zipped.read_bytes()
    dice = random.Random(0)
    for number in range(75):
        damaged = bytearray(whole)
        if number % 3 == 0:
            del damaged[dice.randrange(len(damaged)) :]
        for _ in range(dice.randrange(1, 8)):
            if damaged:
                # most of them in the directory at the end, which is what is trusted most
                start = max(len(damaged) - 1500, 0) if number % 2 else 0
                damaged[dice.randrange(start, len(damaged))] = dice.randrange(256)
        out = tmp_path / str(number)
        said = None
        try:
            path = import_zip(io.BytesIO(bytes(damaged)), out).path
        except ArchiveError as error:
            said = str(error)
        if said is None:
            assert path.parent == out
        else:
            assert "\n" not in said
            assert not out.exists() or not list(out.iterdir())


def test_encrypted_and_foreign_compression_are_named(zipped, tmp_path):
    content = bytearray(zipped.read_bytes())
    place = content.rindex(b"PK\x01\x02")
    content[place + 8] |= 1
    with pytest.raises(ArchiveError, match="is encrypted"):
        import_zip(io.BytesIO(bytes(content)), tmp_path)

    def squeeze(entries):
        entries["first/run.json"][0].compress_type = zipfile.ZIP_LZMA

    with pytest.raises(ArchiveError, match="in another way than stored or deflated"):
        import_zip(rezipped(zipped, squeeze), tmp_path)


def test_a_disk_without_room_is_told_first(zipped, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(OSError, match=r"the run takes 0\.0 MB, and 0\.0 MB are free"):
        import_zip(zipped, tmp_path)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """`command(...)` in an empty folder: exit code, what it printed, its lines on stderr."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)

    def command_(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err.splitlines()

    yield command_
    signal.signal(signal.SIGTERM, handler)


def test_the_command_out_and_in(run, command):
    assert command("export", run) == (0, "first.zip\n", [])
    code, printed, said = command("import", "zip", "first.zip", "--name", "Mine")
    assert (code, printed) == (0, "runs/first\n"), said
    assert "nothing wrong" in said[0]
    assert Run("runs/first").name == "Mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "none-such"], "no run 'none-such'"),
        (["export", "RUN", "--out", "a.tar"], "--out must end in .zip, got 'a.tar'"),
        (["export", "RUN", "--out", "no/where.zip"], "--out no/where.zip: there is no folder"),
        (["import", "zip", "none.zip"], "none.zip: there is no such file"),
        (["import", "zip", "junk.zip"], "this is no sound zip file"),
        (["import", "zip", "junk.zip", "--phase", "train"], "--phase is for dumps"),
        (["import", "zip", "junk.zip", "--out", "s3://b/runs"], "--out must be a folder on this machine"),
        (["import", "rar", "junk.zip"], "KIND must be one of megatron, sglang, vllm, zip, got 'rar'"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_2(run, command, tmp_path, arguments, message):
    (tmp_path / "junk.zip").write_text("junk")
    code, printed, said = command(*[run if text == "RUN" else text for text in arguments])
    assert (code, printed, len(said)) == (2, "", 1)
    assert message in said[0]
    assert [path.name for path in Path(tmp_path).iterdir()] == ["junk.zip"]
