"""The run folder: used ones are refused, and only one launcher holds it."""

import subprocess
import sys

import pytest

from megarl.config.run import RecoverConfig
from megarl.errors import ConfigError
from megarl.launch.folder import claimed, goes_on


def test_a_new_folder_gets_config_and_logs(tmp_path):
    run_dir = tmp_path / "runs" / "e" / "t"
    with claimed(run_dir, "a: 1\n", used="refuse"):
        assert (run_dir / "config.yaml").read_text() == "a: 1\n"
        assert sorted(p.name for p in run_dir.iterdir()) == ["config.yaml", "logs"]


def test_a_trial_does_not_mix_with_another(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "config.yaml").write_text("old")
    message = r"^trial_name: \S+ holds a trial already; .*--overwrite"
    with (
        pytest.raises(ConfigError, match=message),
        claimed(tmp_path, "new", used="refuse"),
    ):
        pass
    assert (tmp_path / "config.yaml").read_text() == "old"


def test_overwrite_deletes_the_trial_and_nothing_else(tmp_path):
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (run_dir / "checkpoints" / "deep").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    (run_dir / "link").symlink_to(elsewhere)
    (run_dir / "metrics.jsonl").write_text("{}\n")
    with claimed(run_dir, "new", used="empty"):
        assert sorted(p.name for p in run_dir.iterdir()) == ["config.yaml", "logs"]
    assert (elsewhere / "kept").exists()


def test_a_start_that_failed_leaves_the_folder_usable(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "old.log").write_text("")
    (tmp_path / "notes").write_text("mine")
    with claimed(tmp_path, "new", used="refuse"):
        assert list((tmp_path / "logs").iterdir()) == []
        assert (tmp_path / "notes").read_text() == "mine"


def test_evaluation_keeps_what_is_there(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with claimed(tmp_path, "new", used="keep"):
        assert (tmp_path / "metrics.jsonl").exists()


def test_logs_of_a_run_that_goes_on_are_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    for text in ("first", "second", "third"):
        with claimed(tmp_path, "same", used="keep"):
            assert list((tmp_path / "logs").iterdir()) == []
            (tmp_path / "logs" / "rank-1.log").write_text(text)
    assert (tmp_path / "logs.1" / "rank-1.log").read_text() == "first"
    assert (tmp_path / "logs.2" / "rank-1.log").read_text() == "second"
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "third"


def test_which_folder_is_gone_on_with(tmp_path):
    on, off = RecoverConfig(freq_steps=1), RecoverConfig()
    assert not goes_on(tmp_path, "config", on)
    (tmp_path / "config.yaml").write_text("config")
    assert goes_on(tmp_path, "config", on), "cut before its first state"
    assert not goes_on(tmp_path, "other config", on)
    assert not goes_on(tmp_path, "config", off)
    (tmp_path / "checkpoints" / "final").mkdir(parents=True)
    assert not goes_on(tmp_path, "config", on), "it ended"
    (tmp_path / "recover").mkdir()
    (tmp_path / "recover" / "latest").write_text("step_3")
    assert goes_on(tmp_path, "other config", off)
    assert not goes_on(tmp_path, "config", RecoverConfig(freq_steps=1, mode="disabled"))


def test_one_launcher_at_a_time(tmp_path):
    """Also with --overwrite, which would delete under a running trial. A dead one holds none."""
    code = (
        "import sys; from pathlib import Path; from megarl.launch.folder import claimed\n"
        "with claimed(Path(sys.argv[1]), 'first', used='empty'):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        with (
            pytest.raises(ConfigError, match="another launcher is running in"),
            claimed(tmp_path, "second", used="empty"),
        ):
            pass
        assert (tmp_path / "config.yaml").read_text() == "first"
        holder.kill()
        holder.wait(60)
    with claimed(tmp_path, "second", used="empty"):
        pass


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"^cluster\.fileroot: \S+file/run: Not a directory$"),
        claimed(tmp_path / "file" / "run", "x", used="refuse"),
    ):
        pass
