"""The terminal view: Textual draws it, over ssh as well, from 80 x 24 up. Needs the extra `watch`."""

from __future__ import annotations

import asyncio
from typing import Any, List, Optional, Sequence, Tuple

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from drumbeat.watch import text as words
from drumbeat.watch.node_view import NodeView
from drumbeat.watch.session import Session

_EVERY = 1.0
_SCROLLBAR = 4  # columns of the screen that a table cannot use: the scroll bar, the edges of its first and last cell
_ROOMY = 36  # lines: from here on events and small curves are shown too
_LABELS = {
    **dict.fromkeys(("failed", "doubt", "error"), "bold red"), "warning": "yellow", "fix": "green", "unknown": "dim",
}  # fmt: skip
_HEAT = ((95.0, "on #12607a"), (80.0, "on #155269"), (60.0, "on #1b4457"), (30.0, "on #4a4320"), (0.0, "on #5a2a2a"))


class Lines(Static):
    """Label and text per line; text of the run is never read as markup."""

    def show(self, lines: Sequence[Tuple[str, str]]) -> None:
        shown = Text(no_wrap=True, overflow="ellipsis")
        colour = ""
        for number, (label, text) in enumerate(words.wrapped(lines, self.app.size.width - 2)):
            colour = _LABELS.get(label, "") if label else colour  # a line without a label goes on with the one before
            shown.append("\n" if number else "")
            shown.append(f"{label:<10} ", _LABELS.get(label, "cyan"))
            shown.append(_printable(text), colour)
        self.update(shown)


class Rows(DataTable[Any]):
    """Table whose rows are identified by their first cell; only rows on the screen are updated. If there is no room for all
    columns, the most important ones are shown."""

    BINDINGS = [
        Binding("home,g", "scroll_top", "first", show=False),
        Binding("end,G", "scroll_bottom", "last", show=False),
        Binding("j", "cursor_down", "down", show=False),
        Binding("k", "cursor_up", "up", show=False),
    ]

    def __init__(self, columns: Sequence[str], name: str, first: Sequence[str] = ()) -> None:
        super().__init__(id=name, cursor_type="row", zebra_stripes=False)
        self.all_titles, self.first = columns, first
        self.titles: List[str] = []  # of the columns that are shown
        self._names: List[str] = []
        self._shown: dict[str, Tuple[str, ...]] = {}
        self._widths: Tuple[int, List[int]] = (0, [])  # of the screen, and the widest that each column was on it

    def show(self, rows: Sequence[Tuple[str, ...]]) -> None:
        names = [row[0] for row in rows]
        width = self.app.size.width - _SCROLLBAR
        rows = [words.cut_row(self.all_titles, row, width) for row in rows]
        places = words.fitting(self.all_titles, self._widest(rows, width), width, self.first)
        titles = [self.all_titles[place] for place in places]
        rows = [tuple(row[place] for place in places) for row in rows]
        if names != self._names or titles != self.titles:
            at = self.cursor_row
            self.clear(columns=True)
            self.titles = titles
            for title in titles:
                self.add_column(title, key=title)
            for row in rows:
                self.add_row(*self._cells(row), key=row[0])
            self._names, self._shown = names, {row[0]: row for row in rows}
            self.move_cursor(row=min(at, len(rows) - 1) if rows else 0)
            return
        first = max(0, int(self.scroll_offset.y) - 2)
        for row in rows[first : first + self.size.height + 4]:
            before = self._shown[row[0]]
            if row != before:
                for title, old, new, cell in zip(self.titles, before, row, self._cells(row)):
                    if old != new:
                        self.update_cell(row[0], title, cell, update_width=True)
                self._shown[row[0]] = row

    def _widest(self, rows: Sequence[Tuple[str, ...]], width: int) -> List[int]:
        """Return the greatest width of each column so far: columns must not come and go with the length of their numbers."""
        widths = words.column_widths(self.all_titles, rows)
        if self._widths[0] == width:
            widths = [max(pair) for pair in zip(widths, self._widths[1])]
        self._widths = (width, widths)
        return widths

    def _cells(self, row: Tuple[str, ...]) -> List[Text]:
        cells = [Text(_printable(cell), no_wrap=True) for cell in row]
        if "use" in self.titles:
            place = self.titles.index("use")
            share = row[place].split()[0] if row[place] else ""
            if share.isdecimal():
                cells[place].stylize(next(colour for limit, colour in _HEAT if float(share) >= limit))
        for title in ("slowed by", "end"):
            if title in self.titles and row[self.titles.index(title)] not in ("", "-", "nothing", "exit code 0"):
                cells[self.titles.index(title)].stylize("yellow")
        return cells


class RankScreen(Screen[None]):
    """The last lines of one rank."""

    BINDINGS = [Binding("escape,q", "app.pop_screen", "back")]

    def __init__(self, session: Session, node: int, rank: int) -> None:
        super().__init__()
        self.session, self.node, self.rank = session, node, rank

    def compose(self) -> ComposeResult:
        yield Static(f"rank {self.rank} on node {self.node}: last lines", classes="title", markup=False)
        yield VerticalScroll(Static(id="lines", markup=False), id="scroll")
        yield Footer()

    def on_mount(self) -> None:
        self.refresh_lines()
        self.set_interval(2.0, self.refresh_lines)

    def refresh_lines(self) -> None:
        scroll = self.query_one("#scroll", VerticalScroll)
        at_end = scroll.max_scroll_y - scroll.scroll_y < 2
        shown = Text()
        for line in self.session.last_lines(self.node, self.rank, 200):
            shown.append(_printable(line.text) + "\n", "yellow" if line.stream == "err" else "")
        self.query_one("#lines", Static).update(shown if len(shown) else Text("it has printed nothing", "dim"))
        if at_end:
            self.call_after_refresh(scroll.scroll_end, animate=False)


class NodeScreen(Screen[None]):
    """One node: its GPUs and its ranks."""

    BINDINGS = [Binding("escape,q", "app.pop_screen", "back")]

    def __init__(self, session: Session, node: int) -> None:
        super().__init__()
        self.session, self.node = session, node

    def compose(self) -> ComposeResult:
        yield Static(id="title", classes="title", markup=False)
        if self._node().gpus:
            yield Rows(words.GPU_COLUMNS, "gpus", words.GPU_FIRST)
        yield Rows(words.RANK_COLUMNS, "ranks")
        yield Footer()

    def on_mount(self) -> None:
        self.call_after_refresh(self.refresh_node)
        self.set_interval(_EVERY, self.refresh_node)
        self.query_one("#ranks", Rows).focus()

    def refresh_node(self) -> None:
        node = self._node()
        lost = f", lost: {node.lost}" if node.lost else ""
        self.query_one("#title", Static).update(Text(_printable(f"node {node.node}  {node.host}{lost}")))
        for rows in self.query("#gpus").results(Rows):
            rows.show(words.gpu_rows(node))
        self.query_one("#ranks", Rows).show(words.rank_rows(node, self.session.view.now))

    @on(DataTable.RowSelected, "#ranks")
    def open_rank(self, event: DataTable.RowSelected) -> None:
        if event.row_key.value is not None:
            self.app.push_screen(RankScreen(self.session, self.node, int(event.row_key.value)))

    def _node(self) -> NodeView:
        return self.session.view.node(self.node)


class WatchApp(App[None]):
    TITLE = "drumbeat"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS = [
        Binding("q", "quit", "quit"),
        Binding("slash", "filter", "filter"),
        Binding("escape", "no_filter", "all", show=False),
        Binding("e", "events", "events"),
    ]
    CSS = """
    Screen { background: $background; }
    #glance { height: auto; max-height: 60%; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    #events { height: auto; max-height: 12; padding: 0 1; border-top: solid $panel; display: none; }
    #events { text-wrap: nowrap; text-overflow: ellipsis; }
    #filter { height: 1; border: none; padding: 0 1; display: none; }
    DataTable { height: 1fr; background: $background; }
    #gpus { height: auto; max-height: 50%; margin-bottom: 1; }
    .title { padding: 0 1; text-style: bold; background: $panel; }
    #scroll { padding: 0 1; }
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session, self.wanted = session, ""

    def compose(self) -> ComposeResult:
        yield Lines(id="glance", markup=False)
        yield Input(placeholder="node, host or trouble; Escape shows all", id="filter", compact=True)
        yield Rows(words.COLUMNS, "nodes", words.FIRST)
        yield Static(id="events", markup=False)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one("#nodes", Rows).focus()
        self.query_one("#events").display = self.size.height >= _ROOMY
        self.call_after_refresh(self.refresh_run)
        self.set_interval(self.session.interval, self.refresh_run)

    async def refresh_run(self) -> None:
        if self.session.due:
            self.session.settle(await asyncio.to_thread(self.session.ask))
        for _ in range(5):
            if not self.session.tick(look=False):
                break
        if self.query("#glance"):  # widgets go first while the program ends
            self.show_run()

    def show_run(self) -> None:
        view = self.session.view
        self.query_one("#glance", Lines).show(words.glance(self.session.head(), view) + self._sparks())
        nodes = [view.nodes[number] for number in sorted(view.nodes)]
        shown = words.matching(nodes, self.wanted) if self.wanted else nodes
        self.query_one("#nodes", Rows).show([words.node_cells(node) for node in shown])
        marks = sorted(view.marks, key=lambda mark: mark.t)[-11:]
        text = Text("\n", no_wrap=True).join(Text(_printable(f"{words.clock(mark.t)}  {mark.text}")) for mark in marks)
        self.query_one("#events", Static).update(text)

    def _sparks(self) -> List[Tuple[str, str]]:
        """Show loss and throughput since the start, if there is room."""
        if self.size.height < _ROOMY:
            return []
        width = min(120, self.size.width - 30)
        view = self.session.view
        shown = {"loss": view.loss.points(), "speed": view.throughput()}
        curves = [(label, [point.mean for point in points]) for label, points in shown.items() if len(points) > 1]
        lines = [(label, f"{words.spark(each, width)}  {min(each):,.4g} to {max(each):,.4g}") for label, each in curves]
        return [("", ""), *lines] if lines else []

    def check_action(self, action: str, parameters: Tuple[object, ...]) -> Optional[bool]:
        """Enable the keys of this screen; a node or a rank on top of it has its own."""
        return len(self.screen_stack) == 1 or action not in ("quit", "filter", "no_filter", "events")

    def action_events(self) -> None:
        events = self.query_one("#events")
        events.display = not events.display

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.display = True
        box.focus()

    def action_no_filter(self) -> None:
        self.query_one("#filter", Input).value = ""
        self._close_filter()

    @on(Input.Changed, "#filter")
    def filter_changed(self, event: Input.Changed) -> None:
        self.wanted = event.value
        self.show_run()

    @on(Input.Submitted, "#filter")
    def _close_filter(self, event: Optional[Input.Submitted] = None) -> None:
        self.query_one("#filter", Input).display = bool(self.wanted)
        self.query_one("#nodes", Rows).focus()

    @on(DataTable.RowSelected, "#nodes")
    def open_node(self, event: DataTable.RowSelected) -> None:
        if event.row_key.value is not None:
            self.push_screen(NodeScreen(self.session, int(event.row_key.value)))


def watch_terminal(session: Session) -> int:
    WatchApp(session).run()
    return 0


def _printable(text: str) -> str:
    """Remove escape sequences from a host name or a line of a rank."""
    return "".join(letter if letter.isprintable() else "?" for letter in text.expandtabs())
