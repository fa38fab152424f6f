"""Makes process trees, and kills what a failing test left of them."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_trees import TREE, Tree


@pytest.fixture
def make_tree(tmp_path: Path) -> Iterator[Callable[[str], Tree]]:
    script = tmp_path / "tree.py"
    script.write_text(TREE)
    trees: list[Tree] = []

    def make(name: str = "tree") -> Tree:
        folder = tmp_path / name
        folder.mkdir()
        trees.append(Tree(script, folder))
        return trees[-1]

    yield make
    for tree in trees:
        for role in tree.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(tree.pid(role), signal.SIGKILL)
