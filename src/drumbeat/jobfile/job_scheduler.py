"""Keys of a job that its scheduler reads."""

from __future__ import annotations

from typing import Dict, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.jobfile.fields import key


@dataclass(frozen=True)
class JobScheduler:
    account: Optional[str] = key(
        "text",
        "The account to charge.",
        "project_465000001",
        None,
        flag="NAME",
        default_text="the scheduler's own variable, else ~/.config/drumbeat/defaults.yaml",
    )
    partition: Optional[str] = key(
        "text",
        "The scheduler's partition or queue.",
        "accel",
        None,
        flag="NAME",
        default_text="the scheduler's own variable, else ~/.config/drumbeat/defaults.yaml, else the site's",
    )
    qos: Optional[str] = key(
        "text",
        "The quality of service.",
        "devel",
        None,
        flag="NAME",
        default_text="the scheduler's own variable, else ~/.config/drumbeat/defaults.yaml",
    )
    memory: Optional[str] = key(
        "size", "Memory of each node.", "440G", None, flag="SIZE", default_text="the site's, else the scheduler's"
    )
    cpus: Optional[int] = key(
        "number",
        "Cores of each node.",
        "288",
        None,
        minimum=1,
        flag="N",
        default_text="the site's, in proportion to the GPUs requested",
    )
    exclusive: bool = key("switch", "No other job on these nodes.", "true", False, flag="switch")
    constraint: Optional[str] = key("text", "Features that nodes must have.", "h200", None, flag="TEXT")
    reservation: Optional[str] = key("text", "A reservation to use.", "course", None, flag="NAME")
    mail: Optional[str] = key(
        "text", "Where to send a mail when the job ends or fails.", "me@example.org", None, flag="TO"
    )
    dependency: Optional[str] = key(
        "text", "Jobs to wait for, in the scheduler's words.", "afterok:1234", None, flag="TEXT"
    )
    array: Optional[str] = key(
        "text",
        "Several jobs from one file: which numbers, and after % how many at once. Each has a run folder of its own, "
        "RUN/array/NUMBER, and the scheduler's variable with its number.",
        "0-3%2",
        None,
        flag="TEXT",
    )
    sweep: Dict[str, Tuple[str, ...]] = key(
        "lists",
        "Values to try: one job for each combination, as an array of the scheduler; `{NAME}` in the command is the value. With "
        "`array: '%2'` two run at a time. As a flag: `--sweep lr=1e-3,1e-4`, repeatable.",
        "{lr: [1e-3, 1e-4], seed: [1, 2]}",
        {},
        flag="NAME=A,B",
        default_text="none",
    )
    requeues: int = key(
        "number",
        "How often drumbeat queues the job again: without the node after a node was lost, or when a rank ends with 75 "
        "though nobody had asked it to stop. What the scheduler or you queue again does not count.",
        "1",
        3,
        minimum=0,
        flag="N",
    )
    bad_nodes: str = key(
        "choice",
        "Whether the scheduler is asked to leave out the nodes that `drumbeat nodes` has on its exclude list.",
        "use",
        "avoid",
        allowed=("avoid", "use"),
        flag="X",
    )
    submit_options: Tuple[str, ...] = key(
        "words", "Other options of the scheduler's submit command, word by word.", '["--licenses=scratch"]', ()
    )
