"""Page of `oobleck top`: its panes, its keys, and the changes that they request.

It reads the feed periodically. It must not call the master, except for a key, in a thread.
"""

import asyncio
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from rich.text import Text
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, OptionList, Static

from oobleck.cli.output import text
from oobleck.cli.output.events import incident_block
from oobleck.cli.output.text import ENDED
from oobleck.cli.top import panes
from oobleck.cli.top.feed import Feed, View
from oobleck.cli.top.panes import Rows
from oobleck.cli.view.state import Cluster, cluster
from oobleck.core.units import count
from oobleck.host.command import CommandFailed
from oobleck.host.display import inline


class Question(ModalScreen[bool]):
    """Question that only the key y confirms; every other way out means no."""

    DEFAULT_CSS = """
    Question { align: center middle; }
    Question Vertical { width: 90%; max-width: 76; height: auto; padding: 0 1; }
    Question Vertical { border: heavy $warning; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)"),
        *(Binding(key, "dismiss(False)") for key in ("n", "escape", "enter", "q", "ctrl+c")),
    ]

    def __init__(self, question: str, consequence: str) -> None:
        super().__init__()
        self._question = question
        self._consequence = consequence

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(self._question, id="question", markup=False)
            yield Static(self._consequence, markup=False)
            yield Static("y yes   n no", id="answers", markup=False)


class Details(ModalScreen[None]):
    """Text that may be longer than the page."""

    DEFAULT_CSS = """
    Details { align: center middle; }
    Details VerticalScroll { width: 100%; height: 100%; border: heavy $primary; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(key, "dismiss") for key in ("escape", "enter", "q", "ctrl+c")
    ]

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title = title
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll() as scroll:
            scroll.border_title = self._title
            scroll.border_subtitle = "q back"
            yield Static(self._text, markup=False)


#: Interval of reading the feed.
_LOOK_S = 0.25
#: Time for which the result of a key is shown.
_SAID_S = 15.0
#: Columns for two lists side by side, and lines for all panes.
_WIDE = 130
_HIGH = 18
_LOWER = ("incidents", "events", "logs")


class Page(App[int]):
    """Terminal app on one cluster, and one of its jobs. Ends with the exit code of the command."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head, #job, #prospects, #said { height: 1; }
    #head { text-style: reverse; }
    #upper { height: 7fr; }
    #nodes, #incidents, #events { padding-right: 1; }
    #nodes { width: 4fr; }
    #pipelines { width: 5fr; }
    #losses { height: 6fr; border-top: solid $primary; }
    #lower { height: 6fr; }
    #incidents, #events, #logs { width: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "drain", "drain"),
        Binding("u", "undrain", "undrain"),
        Binding("c", "cancel", "cancel"),
        Binding("left_square_bracket", "turn(-1)", "job", key_display="[ ]"),
        Binding("right_square_bracket", "turn(1)", show=False),
        Binding("i", "lower('incidents')", "incidents"),
        Binding("e", "lower('events')", "events"),
        Binding("l", "lower('logs')", "logs"),
        Binding("n", "nodes", show=False),
        Binding("z", "zoom", "zoom"),
        Binding("q", "end", "quit"),
        Binding("ctrl+c", "end", show=False),
    ]

    def __init__(self, feed: Feed, address: str) -> None:
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self._feed = feed
        self._address = address
        self._view = View()
        self._cluster: Cluster = cluster((), ())
        self._newest = False
        self._lower = "incidents"
        self._said_at = float("-inf")
        names = ("head", "job", "prospects", "losses", "said")
        self._lines = {name: Static(id=name, markup=False) for name in names}
        #: Current text of each.
        self._shown: dict[str, Text] = {}
        self.nodes = Rows(id="nodes", title="nodes")
        self.incidents = Rows(id="incidents", title="incidents")
        self._lists = {
            "incidents": self.incidents,
            "pipelines": Rows(id="pipelines", title="plan"),
            "events": Rows(id="events", title="events", follows=True),
            "logs": Rows(id="logs", title="logs", follows=True),
        }

    def compose(self) -> ComposeResult:
        yield from (self._lines[name] for name in ("head", "job", "prospects"))
        with Horizontal(id="upper"):
            yield self.nodes
            yield self._lists["pipelines"]
        yield self._lines["losses"]
        with Horizontal(id="lower"):
            yield self.incidents
            yield self._lists["events"]
            yield self._lists["logs"]
        yield self._lines["said"]
        yield Footer(compact=True)

    def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.exit, 128 + number)
        self.nodes.focus()
        self._arrange()
        self.set_interval(_LOOK_S, self._look)
        self.call_after_refresh(self._look)

    # ---- drawing

    def on_resize(self, event: events.Resize) -> None:
        self._arrange()
        self.call_after_refresh(self._draw)

    def _arrange(self) -> None:
        """Show the panes that fit."""
        self._lines["losses"].display = self.size.height >= _HIGH
        wide = self.size.width >= _WIDE
        for name in _LOWER:
            beside = wide and name == ("events" if self._lower == "logs" else "logs")
            self._lists[name].display = name == self._lower or beside

    def _look(self) -> None:
        self._view = self._feed.look()
        self._cluster = cluster(self._view.nodes, self._view.jobs)
        self._draw()

    def _draw(self) -> None:
        view, width = self._view, self.size.width
        self._write("head", panes.head(view, self._cluster, self._address, width, time.time()))
        first, second = panes.job(view, width)
        self._write("job", first)
        self._write("prospects", second)
        if time.monotonic() - self._said_at > _SAID_S:
            self._write("said", ())
        self.nodes.show(panes.nodes(self._cluster.nodes, self.nodes.size.width))
        self.incidents.show(panes.incidents(view, self.incidents.size.width))
        for name, make in (
            ("pipelines", panes.pipelines),
            ("events", panes.events),
            ("logs", panes.logs),
        ):
            pane = self._lists[name]
            if pane.display:
                pane.show([("", row) for row in make(view, pane.size.width)])
        self._draw_losses()

    def _draw_losses(self) -> None:
        pane, history = self._lines["losses"], self._view.history
        points = history.recent if self._newest else history.points
        steps = f"the newest {count(len(points), 'step')}" if self._newest else "all steps"
        pane.border_title = f"loss of {steps}" if points else "loss"
        lines = panes.losses(points, pane.size.width, pane.size.height)
        self._write("losses", (("\n".join(lines), ""),))

    def _write(self, name: str, row: panes.Row) -> None:
        shown = Text.assemble(*row, no_wrap=True)
        if shown != self._shown.get(name):
            self._shown[name] = shown
            self._lines[name].update(shown)

    def _say(self, message: str, style: str = "") -> None:
        """Show the result of a key in one line."""
        self._said_at = time.monotonic()
        self._write("said", panes.fitted(((inline(message), style),), self.size.width))

    # ---- keys

    def action_end(self) -> None:
        self.exit(0)

    def action_turn(self, by: int) -> None:
        self._feed.turn(by)
        self._look()

    def action_lower(self, name: str) -> None:
        self._lower = name
        self._arrange()
        self._lists[name].focus()
        self.call_after_refresh(self._draw)

    def action_nodes(self) -> None:
        self.nodes.focus()

    def action_zoom(self) -> None:
        self._newest = not self._newest
        self._draw()

    async def action_drain(self) -> None:
        if (name := self._chosen_node()) is None:
            return
        job = self._view.job
        consequence = "Its work moves off at a step boundary, and it gets none until undrained."
        if job is not None and job.state not in ENDED:
            left = f"Job {job.job_id} can lose {count(job.can_lose, 'more node')} now."
            consequence = f"{consequence} {left}"
        await self._ask(f"Drain node {name}?", consequence, partial(self._drain, name))

    def action_undrain(self) -> None:
        if (name := self._chosen_node()) is not None:
            self._do(partial(self._undrain, name))

    async def action_cancel(self) -> None:
        job = self._view.job
        if job is None or job.state in ENDED:
            self._say("no job to cancel" if job is None else f"it has {job.state}")
            return
        saved = f"its checkpoint of step {job.checkpoint_step}" if job.checkpoint else ""
        consequence = f"It has {job.committed_step} of {job.steps} steps, and ends for good" + (
            f"; {saved} stays." if saved else "; it has no checkpoint."
        )
        await self._ask(f"Cancel job {job.job_id}?", consequence, partial(self._cancel, job.job_id))

    def _chosen_node(self) -> str | None:
        if self.nodes.chosen is None:
            self._say("no node is selected")
        return self.nodes.chosen

    @on(OptionList.OptionSelected, "#nodes")
    async def _open_node(self) -> None:
        for node in self._view.nodes:
            if node.node == self.nodes.chosen:
                await self.push_screen(Details(f"node {inline(node.node)}", text.node_text(node)))

    @on(OptionList.OptionSelected, "#incidents")
    async def _open_incident(self) -> None:
        for number, record in self._view.history.incidents.items():
            if str(number) == self.incidents.chosen:
                block = incident_block(dict(record), width=max(40, self.size.width - 6))
                await self.push_screen(Details(f"incident {number}", block))
                return
        self._say("its details are shown once it is closed")

    # ---- changes

    async def _ask(self, question: str, consequence: str, then: Callable[[], str]) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                self._do(then)
            else:
                self._say("nothing was changed")

        await self.push_screen(Question(question, consequence), answered)

    def _do(self, change: Callable[[], str]) -> None:
        """Make the change in a thread, because the master may take seconds, and show its result."""
        self._say("asking the master ...", "dim")

        def run() -> None:
            try:
                message, style = change(), ""
            except CommandFailed as failed:
                message, style = failed.format_message(), "bold red"
            self.call_from_thread(self._say, message, style)

        self.run_worker(run, thread=True, exit_on_error=False)

    def _drain(self, name: str) -> str:
        (info,) = self._feed.master.drain(name, reason="", force=False)
        return f"{info.node} {info.state}" + (f": {info.reason}" if info.reason else "")

    def _undrain(self, name: str) -> str:
        info = self._feed.master.undrain(name)
        return f"{info.node} {info.state}" + (f": {info.reason}" if info.reason else "")

    def _cancel(self, job_id: str) -> str:
        job = self._feed.master.cancel(job_id)
        return f"{job.job_id} {job.state}" + (f": {job.reason}" if job.reason else "")
