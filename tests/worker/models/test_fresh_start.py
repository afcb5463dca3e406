"""Models of transformers begin in processes that have seen nothing of them before."""

import json
import os
import re

import pytest

from bench.support.preloaded import Preloaded
from support.folders import ROOT

#: Tables of positions beside the layers, a pooler under a head, images, layers in an inner part of
#: the base model, experts.
FEW = [
    "GPT2LMHeadModel",
    "BertForSequenceClassification",
    "ViTForImageClassification",
    "OPTForCausalLM",
    "MixtralForCausalLM",
]


def begin(preloaded: Preloaded, names: list[str], timeout_s: float) -> dict[str, str]:
    """What went wrong, by name."""
    done = preloaded.run("support.fresh", *names, environment=os.environ, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    told = dict(map(json.loads, done.stdout.splitlines()))
    assert list(told) == names
    return {name: wrong for name, wrong in told.items() if wrong}


@pytest.mark.timeout(180)
def test_what_is_described_in_one_process_begins_in_another_one(preloaded: Preloaded) -> None:
    assert set(FEW) <= set(listed())
    assert begin(preloaded, FEW, 170.0) == {}


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_all_that_the_page_lists_begins(preloaded: Preloaded) -> None:
    assert begin(preloaded, listed(), 3500.0) == {}


def listed() -> list[str]:
    """Architectures whose layers the page has measured."""
    page = (ROOT / "docs" / "huggingface-classes.md").read_text()
    rows = re.findall(r"^\| [^|]* \| yes \| [^|]* \| ([\w, ]+) \|$", page, re.MULTILINE)
    found = [name for row in rows for name in row.split(", ")]
    for end, families in re.findall(r"^\| `(For\w+)` \| (.*) \|$", page, re.MULTILINE):
        found += [family + end for family in families.split(", ")]
    return found
