"""What HOSTS.txt may say, and which line is wrong."""

import pytest

from oobleck.cli.ssh.hosts import Host, parse_hosts


def test_all_that_a_line_may_say() -> None:
    text = """
    # the first rack
    n1
    root@10.0.0.4:2222 name=big workers=8 device=cuda gpus=0,1,2,3 rack=r/1   # the new one
    [fe80::1]:22
    """
    assert parse_hosts(text) == [
        Host(line=3, user="", address="n1", port=None, name="n1"),
        Host(
            line=4,
            user="root",
            address="10.0.0.4",
            port=2222,
            name="big",
            agent_options=(
                *("--workers", "8", "--device", "cuda", "--gpus", "0,1,2,3", "--rack", "r/1"),
            ),
        ),
        Host(line=5, user="", address="fe80::1", port=22, name="fe80-1"),
    ]
    assert [str(host) for host in parse_hosts(text)] == ["n1", "root@10.0.0.4:2222", "[fe80::1]:22"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("n2:0", "'n2:0' is not a host; write [user@]host[:port], an IPv6 address in brackets"),
        ("fe80::1", "'fe80::1' is not a host"),
        ("-oProxyCommand=x", "is not a host"),
        ("n2 workes=2", "'workes=2' is not a known KEY=VALUE; did you mean workers=?"),
        ("n2 name=", "'name=' has no value; write name=VALUE, or leave it out"),
        ("n2 rack", "'rack' has no value; write rack=VALUE"),
        ("n2 workers=two", "workers=two: is not a number"),
        ("n2 workers=0", "a node has 1 to 1024"),
        ("n2 device=tpu", "device=tpu: give cpu or cuda"),
        ("n2 rack=r,1", "rack 'r,1' is not allowed: use 1 to 63 letters"),
        ("n2 gpus=0", "give device=cuda too"),
        ("n2 name=a name=b", "name is given twice"),
        ("n2 name=N/2", "node name 'N/2' is not allowed"),
        ("n2 name=n1", "line 1 is named n1 too"),
        ("n1 name=n2", "n1 is on line 1 too; a host has one agent"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"^line 2: ") as refusal:
        parse_hosts(f"n1\n{line}\n")
    assert words in str(refusal.value)


def test_a_file_without_hosts() -> None:
    with pytest.raises(ValueError, match="names no host"):
        parse_hosts("# none yet\n")
