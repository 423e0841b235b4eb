"""The commit that a run records, which is marked as dirty if code has changed since."""

import subprocess

from salaad.common import provenance


def test_the_recorded_commit_is_dirty_when_code_changed_but_not_when_results_did(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    for name in ("salaad/run.py", "results/one.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    monkeypatch.setattr(provenance, "CHECKOUT", tmp_path)
    head = git("rev-parse", "HEAD")[:12]
    assert provenance.provenance()["commit"] == head
    (tmp_path / "results/one.json").write_text("2")
    (tmp_path / "notes").write_text("not tracked")
    assert provenance.provenance()["commit"] == head
    (tmp_path / "salaad/run.py").write_text("2")
    assert provenance.provenance()["commit"] == f"{head}-dirty"
    monkeypatch.setattr(provenance, "CHECKOUT", tmp_path / "salaad")  # as of a wheel in a project of the user's
    assert provenance.provenance()["commit"] == "unknown"
