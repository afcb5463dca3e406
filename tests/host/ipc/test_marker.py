"""A verdict on a process's end says why, as far as there is room."""

from oobleck.host.ipc.marker import with_last_line

VERDICT = "model: layer 1 (Net): the user's code ended the process with status 1"


def test_a_verdict_has_what_the_process_printed_last_within_a_kibibyte() -> None:
    line = "libgomp: Thread creation failed"
    assert with_last_line(VERDICT, f"{line}\r") == f"{VERDICT} (its last line: {line})"
    ours = "2026-11-27T22:18:12.455Z INFO worker.session entering generation generation=1"
    assert with_last_line(VERDICT, " ") == with_last_line(VERDICT, ours) == VERDICT
    for room in range(2048):
        verdict = "é" * (room // 2) + VERDICT
        told = with_last_line(verdict, "é\x1b" * 1024)
        assert told.startswith(verdict)
        assert told == verdict or (told.endswith("…)") and len(told.encode()) <= 1024)
