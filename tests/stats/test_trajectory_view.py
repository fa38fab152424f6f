"""A dumped trajectory, token by token, in the terminal and as a page."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from megarl.cli import main
from megarl.errors import ConfigError
from megarl.stats.trajectory_view import as_html, as_text, find, token_texts

QUICKSTART_BASE = Path(__file__).parents[2] / "configs" / "quickstart_base"
TEXTS = {5: "<script>alert(1)</script>", 6: "\x1b[31m&\"'", 7: " ok", 8: "\n"}


def sample(index=0, **changes):
    return {
        "task_id": 12,
        "sample_idx": index,
        "seqlen": 6,
        "prompt_len": 1,
        "head_version": 4,
        "tail_version": 3,
        "reward": 1.0,
        "prompt": "p",
        "completion": "c",
        "token_ids": [5, 6, 7, 8, 7, 7],
        "logprobs": [0.0, -0.5, -0.25, 0.0, None, -9.0],
        "versions": [-1, 3, 3, -1, 4, 4],
        "loss_mask": [0, 1, 1, 0, 1, 0],
        **changes,
    }


def dump(run_dir, name, *samples):
    path = run_dir / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(x) + "\n" for x in samples))


@pytest.fixture
def run_dir(tmp_path):
    dump(tmp_path, "rollout/4/12", sample(0), sample(1, reward=0.0))
    return tmp_path


class Page(HTMLParser):
    """Tags that were opened, and the spans with a title."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.spans, self._open = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self._open.append(dict(attributes) if tag == "span" else None)
        if tag == "span" and "title" in self._open[-1]:
            self.spans.append([self._open[-1], ""])

    def handle_endtag(self, tag):
        if self._open:
            self._open.pop()

    def handle_data(self, data):
        if self._open and self._open[-1] and "title" in self._open[-1]:
            self.spans[-1][1] += data


def test_each_token_is_a_line(run_dir):
    lines = as_text(find(run_dir, "12:0"), TEXTS).splitlines()
    assert lines[0].startswith("rollout/4/12:0  reward 1, 6 tokens of which 1 are the prompt")
    cells = [line.split() for line in lines[2:]]
    assert cells[0] == ["0", "5", "'<script>alert(1)</script>'"]
    assert cells[1][:5] == ["1", "6", "yes", "3", "-0.5000"]
    assert cells[3] == ["3", "8", r"'\n'"]  # given: between what was sampled
    assert cells[4][:5] == ["4", "7", "yes", "4", "?"]
    assert cells[5][:4] == ["5", "7", "4", "-9.0000"]  # sampled, not trained
    assert all(line.isprintable() for line in lines)


def test_the_page_has_every_token_and_no_markup_of_the_model(run_dir):
    text = as_html(find(run_dir, "12:0"), TEXTS)
    page = Page(text)
    assert "script" not in page.tags
    assert page.tags <= {
        *("html", "head", "meta", "title", "style", "body"),
        *("h1", "h2", "p", "pre", "span"),
    }
    assert [spoken for _, spoken in page.spans] == [TEXTS[t] for t in sample()["token_ids"]]
    classes = [attributes.get("class") for attributes, _ in page.spans]
    assert classes == ["given", None, None, "given", "version", "unused"]
    titles = [attributes["title"] for attributes, _ in page.spans]
    assert titles[2] == "position 2, id 7, logprob -0.2500, version 3"
    styles = [attributes.get("style") for attributes, _ in page.spans]
    assert styles[0] is styles[3] is None
    assert styles[2] == "background:hsl(93 85% 80%)"  # 120 exp(-0.25)
    assert styles[5] == "background:hsl(0 85% 80%)"
    assert "default-src 'none'" in text
    assert "http:" not in text.replace("http-equiv", "")
    assert "https:" not in text


def test_a_task_names_all_of_its_samples_or_one(run_dir):
    assert [x["sample_idx"] for x in find(run_dir, "12").samples] == [0, 1]
    assert [x["reward"] for x in find(run_dir, "rollout/4/12:1").samples] == [0.0]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("13", r"no dump of task '13' .*rollout.dump_to_file: true"),
        ("12:7", r"has 2 samples, none is '7'"),
        ("1", r"no dump of task '1'"),
        ("20", r"20 is there 2 times, name one: eval-rollout/3/20, rollout/9/20"),
        ("21", r"21.jsonl was written without token ids"),
    ],
)
def test_what_is_not_there_is_named(run_dir, what, message):
    dump(run_dir, "rollout/9/20", sample())
    dump(run_dir, "eval-rollout/3/20", sample())
    old = sample()
    del old["token_ids"]
    dump(run_dir, "rollout/9/21", old)
    with pytest.raises(ConfigError, match=message):
        find(run_dir, what)


def test_the_command_decodes_by_the_runs_tokenizer_and_writes_a_page(run_dir, capsys):
    config = {
        "experiment_name": "e",
        "trial_name": "t",
        "train_dataset": {"path": "rows.jsonl"},
        "actor": {"path": str(QUICKSTART_BASE)},
    }
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["report", str(run_dir), "--trajectory", "12:1"]) == 0
    out = capsys.readouterr().out
    texts = token_texts(run_dir, [sample()])
    assert len(set(texts.values())) == 4
    assert repr(texts[7]) in out
    page = run_dir / "report" / "12-1.html"
    assert f"as a page: {page}" in out
    assert texts[7] in page.read_text()
    assert [x.name for x in page.parent.iterdir()] == ["12-1.html"]


def test_a_tokenizer_that_is_gone_is_one_line(run_dir, capsys):
    config = {
        "experiment_name": "e",
        "trial_name": "t",
        "train_dataset": {"path": "rows.jsonl"},
        "actor": {"path": str(run_dir / "gone")},
    }
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["report", str(run_dir), "--trajectory", "12"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("megarl: tokenizer_path: ")
    assert err.count("\n") == 1
    assert main(["report", str(run_dir), "--html", "x.html"]) == 2
