"""What is packed of a folder, and what is not, and whether it goes along."""

from pathlib import Path

import pytest

from oobleck.cli.jobs import packing
from oobleck.cli.jobs.packing import find, wheel_of
from oobleck.core.job.code import NO_ARGUMENTS, Code, CodePolicy
from oobleck.host.command import CommandFailed
from oobleck.host.wheel import Wheel
from oobleck.proto import control_pb2 as pb
from oobleck.proto.status import code_message


def filled(folder: Path, *paths: str) -> Path:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    return folder


CODE = [
    *("my_model.py", "package/__init__.py", "package/kernels/add.cu", "package/sizes.json"),
    "tools/clean.py",
]


def test_python_and_the_small_files_of_its_packages(tmp_path: Path) -> None:
    others = (
        *("job.yaml", "metrics.json", "login.json", "requirements.txt", "tools/secret.toml"),
        *(".git/config", ".env", "__pycache__/my_model.py", "env/pyvenv.cfg", "env/lib/torch.py"),
        *("state/journal.log", "state/jobs/job.json", "pki/ca.crt", "pki/names.json"),
        *("old/step-5/layer-00000.safetensors", "old/step-5/manifest.json"),
        *("mine.egg-info/SOURCES.txt", "saved/part.json", "corpus/a.txt", "corpus/deep/b.txt"),
    )
    filled(tmp_path, *CODE, *others)
    stays = {str(tmp_path / "saved"), str(tmp_path / "corpus" / "**")}
    found = find(tmp_path, stays=stays)
    assert sorted(found.files) == CODE
    assert sorted(found.left) == [
        *("corpus/a.txt", "corpus/deep/", "env/", "job.yaml", "login.json", "metrics.json"),
        *("old/step-5/", "pki/", "requirements.txt", "saved/", "state/", "tools/secret.toml"),
    ]


def test_the_jobs_own_folder_is_no_package(tmp_path: Path) -> None:
    found = find(filled(tmp_path, "__init__.py", "login.json"))
    assert (list(found.files), found.left) == (["__init__.py"], ["login.json"])


def test_links_that_lead_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    elsewhere = filled(tmp_path / "elsewhere", "helper.py", "login.json", "deep/more.py")
    folder = filled(tmp_path / "job", "my_model.py", "package/__init__.py", "package/one.json")
    (folder / "helper.py").symlink_to(elsewhere / "helper.py")
    (folder / "more").symlink_to(elsewhere / "deep")
    (folder / "package" / "login.json").symlink_to(elsewhere / "login.json")
    (folder / "package" / "two.json").symlink_to("one.json")
    found = find(folder)
    assert sorted(found.files) == [
        *("my_model.py", "package/__init__.py", "package/one.json", "package/two.json")
    ]
    assert sorted(found.left) == ["helper.py", "more/", "package/login.json"]


def test_what_is_no_python_and_what_stays_behind_is_named(tmp_path: Path) -> None:
    filled(tmp_path, "my_model.py", "rows.npy", "n1.token", "weights/a.safetensors")
    filled(tmp_path / "package", "__init__.py", *(f"{number}.json" for number in range(5)))
    (tmp_path / "package" / "large.json").write_bytes(bytes((1 << 20) + 1))
    (tmp_path / "nowhere.py").symlink_to(tmp_path / "nothing.py")
    found = find(tmp_path)
    assert sorted(found.left) == [
        *("n1.token", "nowhere.py", "package/large.json", "rows.npy", "weights/")
    ]
    told = packing._summary(found, tmp_path)
    others = "package/0.json, package/1.json, package/2.json and 2 more"
    assert told.startswith(f"packed 7 files (not Python: {others}), ")
    assert told.endswith("; left out: n1.token, nowhere.py, rows.npy and 2 more")


def test_equal_code_makes_an_equal_wheel(tmp_path: Path) -> None:
    one = filled(tmp_path / "one", *CODE, "job.yaml")
    other = filled(tmp_path / "other", *reversed(CODE), "job.yaml", "metrics.json", "run-1.txt")
    (other / "job.yaml").write_text("another learning rate")
    made = wheel_of(find(one))
    assert made == wheel_of(find(other))
    assert Wheel(made).modules == {"my_model", "package", "tools"}
    (other / "my_model.py").write_text("changed")
    assert made != wheel_of(find(other))


@pytest.mark.parametrize(
    ("limit", "most"), [("_MOST_FILES", 3), ("_MOST_BYTES", 30), ("_MOST_ENTRIES", 3)]
)
def test_too_much_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    filled(tmp_path, *CODE)
    monkeypatch.setattr(packing, limit, most)
    with pytest.raises(CommandFailed, match=r"more than .*a folder of its own.*--no-pack"):
        find(tmp_path)


NOTHING = CodePolicy()
TAKES = CodePolicy(accepts=True)
TAKES_ANY = CodePolicy(accepts=True, allows=("*",))


def node(code: CodePolicy | None, state: str = "live") -> pb.NodeInfo:
    return pb.NodeInfo(node="n", hostname="elsewhere", state=state, code=code_message(code))


def has(folder: Path, *, accepts: bool = False) -> CodePolicy:
    return CodePolicy(accepts=accepts, allows=(str(folder),))


def travels(folder: Path, *nodes: pb.NodeInfo) -> bool:
    code = Code(name="m:f", group=None, path=str(folder), arguments=NO_ARGUMENTS)
    return packing._travels(code, folder, nodes)


def test_code_goes_along_where_more_nodes_take_it_than_allow_its_folder(tmp_path: Path) -> None:
    assert travels(tmp_path, node(TAKES), node(TAKES), node(has(tmp_path)))
    assert not travels(tmp_path, node(TAKES), node(has(tmp_path)), node(has(tmp_path.parent)))
    assert not travels(tmp_path, node(has(tmp_path, accepts=True)))
    assert not travels(tmp_path, node(CodePolicy(allows=("*",))))
    assert travels(tmp_path, node(TAKES_ANY))
    assert travels(tmp_path, node(has(tmp_path / "other", accepts=True)))


def test_code_goes_along_to_no_nodes_and_to_those_that_take_none(tmp_path: Path) -> None:
    """The refusal then names the flag that is most use."""
    assert travels(tmp_path)
    assert travels(tmp_path, node(NOTHING), node(CodePolicy(allows=("package",))))


def test_code_stays_where_no_node_says_what_it_runs(tmp_path: Path) -> None:
    assert not travels(tmp_path, node(None), node(None))
    assert travels(tmp_path, node(None), node(TAKES))


def test_code_stays_where_a_link_may_lead_from_it_to_what_nodes_allow(tmp_path: Path) -> None:
    assert not travels(tmp_path, node(has(tmp_path / "on the node alone")))
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert not travels(link, node(has(tmp_path, accepts=True)))


@pytest.mark.parametrize("state", ["lost", "left", "disconnected"])
def test_nodes_that_are_not_there_have_no_vote(tmp_path: Path, state: str) -> None:
    gone = node(has(tmp_path), state)
    assert travels(tmp_path, gone, gone, node(TAKES))
    assert travels(tmp_path, gone)
