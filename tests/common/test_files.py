"""New folders appear whole or not at all, checksums find every damage to a copy, and JSON files are read safely."""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from salaad.common.errors import UserError
from salaad.common.files import (
    digest_of,
    json_file,
    new_folder,
    read_json,
    read_object,
    require_new,
    require_place,
    require_writable,
    tokenizer_errors,
    verify,
    write_checksums,
    write_json,
)

CONTENTS = {
    "model/config.json": b"{}",
    "model/model.safetensors": bytes(range(256)) * 5000,
    "model/empty": b"",
    "state/trainer.json": b"abc",
    "state/rank-0/checksums.json": b"its own",
    "README": b"abc",
}


@pytest.fixture
def folder(tmp_path):
    """A folder with its checksums."""
    folder = tmp_path / "checkpoint"
    for name, content in CONTENTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    write_checksums(folder)
    return folder


def refused(folder: Path, *parts: str) -> str:
    with pytest.raises(UserError) as caught:
        verify(folder, *parts)
    sentence = str(caught.value)
    assert "\n" not in sentence and "; give a whole" in sentence
    return sentence


# ---- checksums


def test_the_list_holds_the_sha256_of_every_file_but_itself(folder):
    listed = json.loads((folder / "checksums.json").read_text())
    assert listed == {name: hashlib.sha256(content).hexdigest() for name, content in CONTENTS.items()}
    # The digest of "abc" in the standard that defines SHA-256 (FIPS 180-4).
    assert listed["README"] == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_list_written_again_is_the_same(folder):
    before = (folder / "checksums.json").read_bytes()
    write_checksums(folder)
    assert (folder / "checksums.json").read_bytes() == before


def test_a_whole_folder_has_one_digest_wherever_it_lies(folder, tmp_path):
    digest = verify(folder)
    shutil.copytree(folder, tmp_path / "elsewhere" / "copy")
    assert verify(tmp_path / "elsewhere" / "copy") == digest
    assert len(digest) == 64 and int(digest, 16)


def alter_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


@pytest.mark.parametrize("damage", [alter_a_byte, truncate, append])
@pytest.mark.parametrize("name", [name for name, content in CONTENTS.items() if content])
def test_a_changed_file_is_named(damage, name, folder):
    damage(folder / name)
    found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    written = hashlib.sha256(CONTENTS[name]).hexdigest()
    sentence = refused(folder)
    assert f"{folder / name} is not as it was written" in sentence
    assert found[:8] in sentence and written[:8] in sentence


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def become_a_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "nowhere")


@pytest.mark.parametrize("damage", [Path.unlink, become_a_folder, become_a_dangling_link])
@pytest.mark.parametrize("name", ["model/empty", "README"])
def test_a_missing_file_is_named(damage, name, folder):
    damage(folder / name)
    assert f"{folder / name} is missing" in refused(folder)


def test_only_the_parts_asked_for_are_compared(folder):
    model, both = verify(folder, "model/*"), verify(folder, "model/*", "state/*")
    alter_a_byte(folder / "state" / "trainer.json")
    (folder / "README").unlink()
    assert verify(folder, "model/*") == model
    assert "trainer.json" in refused(folder, "state/*")
    assert "trainer.json" in refused(folder, "model/*", "state/*")
    refused(folder)
    (folder / "state" / "trainer.json").write_bytes(CONTENTS["state/trainer.json"])
    assert verify(folder, "model/*", "state/*") == both
    assert "README" in refused(folder)


def test_parts_have_digests_of_their_own(folder):
    assert (
        len(
            {verify(folder), verify(folder, "model/*"), verify(folder, "state/*"), verify(folder, "model/*", "state/*")}
        )
        == 4
    )


@pytest.mark.parametrize("name", CONTENTS)
def test_the_digest_changes_with_every_file_and_comes_back_with_it(name, folder):
    before = {part: verify(folder, *part) for part in ((), ("model/*",), ("state/*",))}
    append(folder / name)
    write_checksums(folder)
    for part, digest in before.items():
        changed = not part or name.startswith(part[0][:-1])
        assert (verify(folder, *part) != digest) == changed
    (folder / name).write_bytes(CONTENTS[name])
    write_checksums(folder)
    assert {part: verify(folder, *part) for part in before} == before


def swap(folder: Path) -> None:
    (folder / "model" / "config.json").rename(folder / "spare")
    (folder / "model" / "empty").rename(folder / "model" / "config.json")
    (folder / "spare").rename(folder / "model" / "empty")


@pytest.mark.parametrize(
    "change",
    [
        swap,
        lambda folder: (folder / "README").rename(folder / "readme"),
        lambda folder: (folder / "README").rename(folder / "model" / "README"),
        lambda folder: (folder / "model" / "empty").unlink(),
        lambda folder: (folder / "another").write_bytes(b""),
    ],
    ids=["swapped", "renamed", "moved", "removed", "added"],
)
def test_the_digest_changes_with_names(change, folder):
    before = verify(folder)
    change(folder)
    write_checksums(folder)
    assert verify(folder) != before


def test_the_digest_depends_on_nothing_but_names_and_contents(folder, monkeypatch):
    before = verify(folder)
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))
        path.chmod(0o700)
    (folder / "unlisted").write_text("of no concern")
    assert verify(folder) == before
    (folder / "unlisted").unlink()
    rglob = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda path, pattern: reversed(list(rglob(path, pattern))))
    write_checksums(folder)  # as on a disk that lists its files in another order
    assert verify(folder) == before


def test_a_folder_without_a_list_is_of_an_older_version(folder):
    (folder / "checksums.json").unlink()
    with pytest.raises(UserError, match="so an older version wrote it; use that one"):
        verify(folder)


@pytest.mark.parametrize("damage", [truncate, lambda path: path.write_bytes(b"\xff\x00")])
def test_a_folder_without_a_readable_list_is_refused(damage, folder):
    (folder / "checksums.json").write_text('{"README": "0"')
    damage(folder / "checksums.json")
    assert f"{folder / 'checksums.json'} cannot be read" in refused(folder)


def test_the_digest_of_some_files_is_that_of_their_names_and_contents(folder, tmp_path):
    files = [folder / "README", folder / "model" / "config.json"]
    before = digest_of(files)
    copies = [Path(shutil.copy(file, tmp_path)) for file in files]
    assert digest_of(copies) == before
    assert digest_of(files[:1]) != before
    append(copies[1])
    assert digest_of(copies) != before
    renamed = [copies[0].rename(tmp_path / "other"), files[1]]
    assert digest_of(renamed) != before


# ---- folders


def fill(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "file").write_text("new")


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", ["model", "runs/nano/model.v1"])
def test_a_folder_appears_when_it_is_whole(name, tmp_path):
    target = tmp_path / name
    with new_folder(target) as partial:
        fill(partial)
        assert not target.exists()
        # On the same disk, so that the last step is one rename, and hidden, so that `*` does not match it.
        assert partial.parent == target.parent and partial.name.startswith(".")
    assert listing(target) == ["inner", "inner/file"]
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("error", [ValueError, UserError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_after_an_error_and_the_next_attempt_succeeds(error, tmp_path):
    target = tmp_path / "model"
    with pytest.raises(error, match="halfway"), new_folder(target) as partial:
        fill(partial)
        raise error("halfway")
    assert list(tmp_path.iterdir()) == []
    with new_folder(target) as partial:
        fill(partial)
    assert listing(tmp_path) == ["model", "model/inner", "model/inner/file"]


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to(path.parent)])
def test_what_exists_is_refused_and_stays(make, tmp_path):
    target = tmp_path / "model"
    make(target)
    before = target.lstat()
    for attempt in (lambda: require_new(target), lambda: new_folder(target).__enter__()):
        with pytest.raises(UserError, match=r"--output .*model exists, and nothing is overwritten; give a folder"):
            attempt()
    after = target.lstat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert list(tmp_path.iterdir()) == [target]


def test_what_another_program_puts_there_meanwhile_stays(tmp_path):
    target = tmp_path / "model"
    with pytest.raises(OSError), new_folder(target) as partial:
        fill(partial)
        target.mkdir()
        (target / "theirs").write_text("old")
    assert listing(tmp_path) == ["model", "model/theirs"]
    assert (target / "theirs").read_text() == "old"


def test_what_a_crash_left_is_replaced(tmp_path):
    target = tmp_path / "model"
    with new_folder(tmp_path / "other") as found:
        remains = target.with_name(found.name.replace("other", "model"))
    shutil.rmtree(tmp_path / "other")
    remains.mkdir()
    fill(remains)
    (remains / "inner" / "file").write_text("old")
    (remains / "stale").write_text("old")
    with new_folder(target) as partial:
        assert list(partial.iterdir()) == []
        fill(partial)
    assert listing(tmp_path) == ["model", "model/inner", "model/inner/file"]
    assert (target / "inner" / "file").read_text() == "new"


def test_of_two_writers_of_one_folder_the_second_is_refused_and_the_first_goes_on(tmp_path):
    target = tmp_path / "model"
    with new_folder(target) as partial:
        fill(partial)
        with pytest.raises(UserError, match="is being written by another process; wait"), new_folder(target):
            pass
        assert listing(partial) == ["inner", "inner/file"]
    assert listing(tmp_path) == ["model", "model/inner", "model/inner/file"]


def test_where_no_folder_can_be_made_is_said_before_the_work(tmp_path):
    require_place(tmp_path / "new" / "model")
    assert listing(tmp_path) == ["new"]
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "model", tmp_path / ("a" * 300) / "model"):
        with pytest.raises(UserError, match=r"--output .* cannot be made or written to \(.*\); give a folder"):
            require_place(place)


def test_neighbours_are_left_alone(tmp_path):
    for name in (".partial-model2", ".hidden", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("old")
    before = listing(tmp_path)
    with new_folder(tmp_path / "model") as partial:
        fill(partial)
    assert listing(tmp_path) == sorted([*before, "model", "model/inner", "model/inner/file"])


# ---- JSON


@pytest.mark.parametrize("value", [{}, [1, 2.5, None, True], {"a": {"b": ["κ", ""]}, "c": 1e-300, "d": 2**60}])
def test_json_is_read_as_it_was_written_and_by_others_too(value, tmp_path):
    write_json(value, tmp_path / "value.json")
    assert read_json(tmp_path / "value.json") == value == json.loads((tmp_path / "value.json").read_bytes())
    assert (tmp_path / "value.json").read_bytes().endswith(b"\n")


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        become_a_folder,
        truncate,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff\xfe{}"),
        lambda path: path.write_bytes(b'{"a": 1} {}'),
    ],
    ids=["missing", "folder", "truncated", "empty", "binary", "trailing"],
)
def test_json_that_cannot_be_read_is_named_in_a_sentence(damage, tmp_path):
    path = tmp_path / "index.json"
    path.write_text('{"a": 1}')
    damage(path)
    for read, cure in (
        (read_object, "give a whole checkpoint"),
        (read_json, "restore it, or delete it and make it anew"),
    ):
        with pytest.raises(UserError, match=rf"index\.json cannot be read \(.+\); {cure}$") as caught:
            read(path)
        assert "\n" not in str(caught.value)


def test_the_folder_of_a_json_file_is_made_before_the_work_that_it_is_to_keep(tmp_path):
    assert json_file(str(tmp_path / "new" / "rows.json")) == tmp_path / "new" / "rows.json"
    assert (tmp_path / "new").is_dir()


def test_a_folder_that_cannot_be_written_to_is_told_before_the_work():
    """Nobody can write to /proc, which is there."""
    with pytest.raises(UserError, match=r"--output /proc cannot be made or written to .*; give a folder you can"):
        json_file("/proc/rows.json")


TABLE = {"versions": "1", "commit": "2", "machine": "3", "rows": [{}]}


@pytest.mark.parametrize(
    "text", ['{"rows": [', "7", '{"rows": [1]}', json.dumps(TABLE | {"rows": [1]}), json.dumps(TABLE | {"rows": 1})]
)
def test_a_damaged_table_or_another_file_is_no_table_of_ours(tmp_path, text):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(UserError, match=r"rows\.json is there and no table of ours.*; give another --output"):
        require_writable(tmp_path / "rows.json")


def test_a_picture_is_drawn_anew_only_beside_a_table_of_ours(tmp_path):
    table, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    require_writable(table, [picture])
    picture.write_text("the user's")
    with pytest.raises(UserError, match=r"rows\.png is there and no picture of ours.*; give another --output"):
        require_writable(table, [picture])
    table.write_text(json.dumps(TABLE))
    require_writable(table, [picture])
    picture.unlink()
    picture.mkdir()
    with pytest.raises(UserError, match=r"rows\.png is there and no picture of ours"):
        require_writable(table, [picture])


def test_a_tokenizer_that_finds_the_disk_full_raises_an_error_of_the_disk(tmp_path):
    """The library's own error is a bare Exception; /dev/full takes no byte."""
    with pytest.raises(OSError, match="No space left") as caught, tokenizer_errors(tmp_path):
        Tokenizer(models.BPE()).save("/dev/full")
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(ZeroDivisionError), tokenizer_errors(tmp_path):
        1 / 0  # noqa: B018


@pytest.mark.parametrize(("name", "said"), [("README.md", "JSON is written"), ("taken/rows.json", "cannot be made")])
def test_a_json_file_that_cannot_be_written_or_may_be_another_is_refused(tmp_path, name, said):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UserError, match=said) as caught:
        json_file(str(tmp_path / name))
    assert "; give a" in str(caught.value)
