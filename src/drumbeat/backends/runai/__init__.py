"""Backend `runai`: a PyTorch training of Run:ai, one pod per node, through the `runai` command; docs/runai.md."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import secrets
import shlex
import subprocess
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat import __version__
from drumbeat.backends.contract import QUEUED, RUNNING, Backend, Request, Status, Unreachable, parse_handle
from drumbeat.backends.kubernetes import FetchedFiles
from drumbeat.backends.kubernetes.client import Cluster
from drumbeat.backends.kubernetes.pod import hosts_of, manifest, node_script, python_of
from drumbeat.backends.kubernetes.submit import check as check_pod
from drumbeat.backends.kubernetes.submit import object_name, passed_values
from drumbeat.backends.runai import client
from drumbeat.base.order import FUNCTION, Option, Order, dump_order, read_order
from drumbeat.base.problem import Problem
from drumbeat.base.record import RecordError
from drumbeat.base.redact import printable
from drumbeat.base.regex import regex
from drumbeat.bundle.build import cached_bundle, cached_payload
from drumbeat.jobfile.check import parse_duration
from drumbeat.jobfile.site import load_site
from drumbeat.runfolder.files import replace
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.mirror import Mirror, Source, is_complete

# Files for Run:ai's pods: all in one secret, passed as variables, which both generations of the CLI support.


LOCAL = "/tmp/drumbeat-run"  # noqa: S108 - in the pod, which nobody else is in
TOKEN, SCRIPT, ORDER, PROGRAM = "DRUMBEAT_TOKEN", "DRUMBEAT_SCRIPT", "DRUMBEAT_ORDER", "DRUMBEAT_PROGRAM"  # noqa: S105
PIECE = 120_000  # characters: the kernel limits a variable to 128 KiB
PIECES = 9  # always this many, whatever the size: the command line must not depend on it
LARGEST = 1_040_000  # bytes: a secret holds 1 MiB

COMMAND = ["sh", "-c", f'exec sh -c "${SCRIPT}"']


def run_folder(order: Order, wanted: str) -> str:
    return os.path.join(wanted or LOCAL, order.run_id)


def secret_names(order: Order) -> Tuple[str, ...]:
    return (TOKEN, SCRIPT, ORDER, *(f"{PROGRAM}_{number}" for number in range(PIECES)), *order.passed)


def secret_values(
    order: Order, sent: str, folder: str, linger: int, bundle: str, environ: Mapping[str, str]
) -> Dict[str, str]:
    """Return the values of the job's secret. `sent` is the order as pods read it."""
    text = base64.b85encode(cached_payload(bundle, environ)).decode()
    pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    if len(pieces) > PIECES:
        raise Problem(f"drumbeat.pyz has {len(text)} characters, more than {PIECES} variables of a pod can hold")
    pieces += [""] * (PIECES - len(pieces))
    values = {TOKEN: secrets.token_hex(32), ORDER: sent, SCRIPT: pod_script(order, folder, linger)}
    values.update({f"{PROGRAM}_{number}": piece for number, piece in enumerate(pieces)})
    values.update(passed_values(order, environ))
    if sum(map(len, values.values())) > LARGEST:
        raise Problem(f"what the pods need is more than a secret holds ({LARGEST} bytes)")
    return values


def pod_script(order: Order, folder: str, linger: int) -> str:
    names = " ".join((SCRIPT, ORDER, *(f"{PROGRAM}_{number}" for number in range(PIECES))))
    unpack = (
        "import base64, lzma, os, sys; "
        f"text = ''.join(os.environ['{PROGRAM}_%d' % number] for number in range({PIECES})); "
        "open(sys.argv[1], 'wb').write(lzma.decompress(base64.b85decode(text))); "
        f"open(sys.argv[2], 'w').write(os.environ['{ORDER}'])"
    )
    program, order_file = f"{LOCAL}/drumbeat.pyz", f"{LOCAL}/order.json"
    prepare: List[str] = [
        f"mkdir -p -m 700 {LOCAL} || exit 74",
        f"{shlex.quote(python_of(order))} -I -S -c {shlex.quote(unpack)} {program} {order_file} || exit 78",
        f"unset {names}  # ranks have no use for them",
    ]
    return node_script(order, folder, linger, prepare, program, order_file)


SCRIPT_FILE = "runai.sh"
_OWN = ("--run-folder", "--linger")  # options of ours; all others are those of `runai`
_LINGER = 600  # seconds
_MUSTER = 900.0
_PROJECT = regex(r"[a-z0-9]([a-z0-9-]{0,55}[a-z0-9])?")  # its namespace is runai-PROJECT, at most 63 characters
_FILES = 60.0  # seconds for one answer out of a pod


class RunAi(Backend):
    name = "runai"
    title = "Run:ai"
    no_spares = "a pod that is lost is replaced by the cluster itself"
    replaces_nodes = True
    no_range = "drumbeat asks it for a fixed number of pods"
    default_site = "rcp"
    specific = ("qos",)
    leaves_objects = True

    def check(self, order: Order, where: Callable[[str], str]) -> None:
        super().check(order, where)
        check_pod(order)
        _split(order)
        if not order.resources.account:
            raise Problem(
                "a job of Run:ai belongs to a project, and this one names none",
                "account: PROJECT in the job file, or --account; runai project list shows yours",
            )
        if order.container and order.container.binds:
            raise Problem(
                f"{where('binds')}: Run:ai mounts claims, not folders of a machine",
                "submit-options: ['--existing-pvc claimname=NAME,path=/PATH']",
            )
        if not _PROJECT.fullmatch(order.resources.account):
            raise Problem(
                f"{where('account')}: {order.resources.account[:80]!r} cannot be the name of a project",
                "runai project list shows yours",
            )
        if not order.resources.partition.isprintable():
            raise Problem(f"{where('partition')}: {order.resources.partition[:80]!r} cannot be the name of a node pool")
        for option in order.resources.options:
            if not option.text.startswith("-") or not option.text.isprintable():
                place = option.place or where("submit-options")
                raise Problem(f"{place}: {option.text[:80]!r} is not an option of runai")

    def notes(self, order: Order) -> List[str]:
        said = [*_part_of_a_node(order)]
        if os.path.isdir(order.workdir):
            said.append(
                f"{order.workdir} is a folder of this machine: in a pod it must be part of the image or on a claim; "
                "workdir: names another"
            )
        _, folder, linger = _split(order)
        if not folder:
            said.append(
                f"the run folder is fetched from the pods: `drumbeat logs --follow` or `status` within {linger} s after the "
                "end; with --run-folder=PATH on a claim it stays"
            )
        return said

    def render(self, order: Order) -> Request:
        self._check_pods(order)
        cli, why = client.find_cli(os.environ)
        return render(order, client.with_flags(cli, os.environ), why)

    def draft(self, order: Order, unreachable: Unreachable) -> Request:
        self._check_pods(order)
        return render(order, client.CLI_2, f"not asked, CLI 2 is assumed: {unreachable.what}")

    def _check_pods(self, order: Order) -> None:
        check_pod(order)
        if order.code == "sync":
            raise Problem(
                "code: sync is not sent to pods of Run:ai: a secret that its pods read has no room for it",
                "put the code on a claim (code: shared, --existing-pvc ...) or into the image (code: image)",
            )
        if FUNCTION in order.brings:
            raise Problem(
                "a function is not sent to pods of Run:ai: a secret that its pods read has no room for it",
                "put it into a script on a claim or in the image, and submit the script as the job's command",
            )

    def handle(self, order: Order, environ: Mapping[str, str]) -> str:
        return f"runai://{order.resources.account}/{object_name(order.run_id)}"

    def submit(self, request: Request, environ: Mapping[str, str]) -> str:
        order = request.order
        name, cluster = object_name(order.run_id), _cluster(order.resources.account, environ)
        _, folder, linger = _split(order)
        timing = dataclasses.replace(order.timing, muster=_MUSTER)
        sent = dump_order(dataclasses.replace(order, folder=run_folder(order, folder), timing=timing))
        values = secret_values(order, sent, run_folder(order, folder), linger, cached_bundle(environ), environ)
        secret = manifest("Secret", name, {}, type="Opaque", stringData=values)
        path = os.path.join(order.folder, SCRIPT_FILE)
        replace(path, request.text)
        handle = self.handle(order, environ)
        try:
            cluster.call("create", "-f", "-", stdin=json.dumps(secret).encode(), seconds=120.0)
            done = client.call(["sh", path], environ, seconds=120.0)
            if done.returncode != 0:
                raise client.refusal(done, "refuses this job")
        except Problem:
            RunaiJob(handle, environ).take_back()
            raise
        return handle

    def status(self, handle: str, environ: Mapping[str, str]) -> Status:
        job = RunaiJob(handle, environ)
        return client.read_status(handle, job.run(job.cli.describe, "-o", "json"))

    def cancel(self, handle: str, environ: Mapping[str, str]) -> None:
        RunaiJob(handle, environ).remove()

    def shell(self, handle: str, host: str, environ: Mapping[str, str], command: Sequence[str] = ()) -> List[str]:
        job = RunaiJob(handle, environ)
        if command:
            return job.argv(job.cli.execute, "--pod", host, "--stdin", "--", *command)
        return job.argv(job.cli.shell, "--pod", host)  # a pod's host name is its own

    def run_files(self, folder: str, handle: str, environ: Mapping[str, str]) -> Optional[Mirror]:
        if is_complete(folder):
            return None
        try:
            order = read_order(RunFolder(folder).order)
        except (OSError, RecordError):
            return None
        return RunaiPodFiles(folder, order, RunaiJob(handle, environ)).mirror(every=2.0)

    def finish(self, handle: str, environ: Mapping[str, str]) -> None:
        RunaiJob(handle, environ).remove()


def render(order: Order, cli: client.Cli, why: str) -> Request:
    """Render the command as a script: `sh RUN/runai.sh` is what submit runs."""
    name = object_name(order.run_id)
    options, _, _ = _split(order)
    asked = dataclasses.replace(order, resources=dataclasses.replace(order.resources, options=options))
    plain = {
        "DRUMBEAT_SCHEDULER": "runai",
        "DRUMBEAT_JOB": name,
        "DRUMBEAT_HOSTS": ",".join(hosts_of("pytorchjob", name, order.nodes)),
        "DRUMBEAT_REJOIN": "1",
    }
    if order.resources.gpus:
        plain["DRUMBEAT_GPUS"] = str(order.resources.gpus)
    secret = {variable: variable for variable in secret_names(order)}
    groups = client.submit_lines(cli, asked, name, plain, secret, COMMAND)
    reasons = {client.words_of(option.text): option.why for option in options}
    about = [
        f"Written by drumbeat {__version__} for run {order.run_id}: `drumbeat submit` runs exactly this file.",
        f"{why}; one pod per node: one master and {order.nodes - 1} worker{'s' * (order.nodes != 2)}.",
        f"Made at submit and not shown: the Secret {name} in {_namespace(order.resources.account)}, with drumbeat, the order,",
        "the run's token and the values of variables that are passed on.",
        *(f"{' '.join(words)}: {reason}" for words, reason in reasons.items()),
    ]
    lines = [
        "#!/bin/sh",
        *(f"# {' '.join(printable(line).split())}" for line in about),  # a comment ends with its line
        "runai " + " \\\n  ".join(shlex.join(group) for group in groups),
    ]
    return Request("runai", order, "\n".join(lines) + "\n")


class RunaiJob:
    def __init__(self, handle: str, environ: Mapping[str, str]) -> None:
        parsed = parse_handle(handle)
        if parsed is None:
            raise Problem(f"{handle!r} is not a job of Run:ai", "it looks like runai://PROJECT/NAME")
        self.project, self.name, self.environ = parsed.cluster, parsed.id, environ
        self._cli: Optional[client.Cli] = None

    @property
    def cli(self) -> client.Cli:
        if self._cli is None:
            self._cli = client.find_cli(self.environ)[0]
        return self._cli

    def argv(self, command: Tuple[str, ...], *words: str) -> List[str]:
        project = ["-p", self.project] if self.project else []
        return ["runai", *command, self.name, *project, *words]

    def run(
        self, command: Tuple[str, ...], *words: str, stdin: Optional[bytes] = None
    ) -> subprocess.CompletedProcess[bytes]:
        return client.call(self.argv(command, *words), self.environ, stdin, _FILES)

    def remove(self) -> None:
        """Remove the job and its secret; a submit that was killed may have left the secret alone."""
        done = self.run(self.cli.delete)
        words = ("delete", "secret", self.name, "--ignore-not-found", "-o", "name")
        secret = _cluster(self.project, self.environ).try_call(*words).stdout.strip()
        if done.returncode != 0 and not (secret and client.is_gone(done)):
            raise client.refusal(done, "does not delete the job")

    def take_back(self) -> None:
        """Clean up after a failed submit; if only the answer came too late, the job exists after all."""
        with contextlib.suppress(Problem):
            self.run(self.cli.delete)
        with contextlib.suppress(Problem):
            _cluster(self.project, self.environ).try_call("delete", "secret", self.name, "--ignore-not-found")


class RunaiPodFiles(FetchedFiles):
    """Run folder of a job, fetched from each pod through `runai exec`."""

    def __init__(self, folder: str, order: Order, job: RunaiJob) -> None:
        super().__init__(folder)
        self.order, self.job = order, job
        self.inside = run_folder(order, _split(order)[1])

    def look(self) -> List[Source]:
        done = self.job.run(self.job.cli.describe, "-o", "json")
        if done.returncode != 0 or client.read_status("", done).state == QUEUED:
            return []
        pods = hosts_of("pytorchjob", self.job.name, self.order.nodes)
        return [Source(self._exchange(pod, node), f"nodes/{node}" if node else "") for node, pod in enumerate(pods)]

    def _exchange(self, pod: str, node: int) -> Callable[[bytes], Optional[bytes]]:
        def exchange(request: bytes) -> Optional[bytes]:
            program = (python_of(self.order), "-I", "-S", f"{LOCAL}/drumbeat.pyz", "_files", self.inside)
            try:
                done = self.job.run(self.job.cli.execute, "--pod", pod, "--stdin", "--", *program, stdin=request)
                if done.returncode != 0 and pod not in self.kept:  # it may have ended: its output is kept
                    output = self.job.run(self.job.cli.logs, "--pod", pod)
                    if output.returncode == 0 and output.stdout:
                        self.keep_output(node, output.stdout)
                        if client.read_status("", self.job.run(self.job.cli.describe, "-o", "json")).state != RUNNING:
                            self.kept.add(pod)
            except Problem:
                return None  # `status` says why Run:ai does not answer
            return done.stdout if done.returncode == 0 else None

        return exchange

    def remove(self) -> None:
        self.job.remove()


def _part_of_a_node(order: Order) -> List[str]:
    """Warn about a job that uses part of a node: Run:ai may put two such pods on one machine or on two."""
    try:
        whole = load_site(order.site, os.environ).gpus
    except Problem:  # a profile given by its path
        return []
    asked = order.resources.gpus
    if not whole or not asked or asked >= whole or order.nodes == 1:
        return []
    return [
        f"{order.nodes} pods with {asked} of a node's {whole} GPUs each: pods may share a machine or not, and GPUs of two pods "
        f"talk over the network either way; pods with {whole} GPUs are faster (--gpus {whole})"
    ]


def _namespace(project: str) -> str:
    return f"runai-{project}" if project else "your project's namespace"


def _cluster(project: str, environ: Mapping[str, str]) -> Cluster:
    return Cluster(environ, "", _namespace(project) if project else "")


def _split(order: Order) -> Tuple[Tuple[Option, ...], str, int]:
    """Split the options into those for `runai` and ours: the run folder in the pods, and how long the lead's pod waits to
    be fetched."""
    own: Dict[str, str] = {}
    kept: List[Option] = []
    for option in order.resources.options:
        flag, _, value = option.text.partition("=")
        if flag in _OWN:
            own.setdefault(flag, value)
        else:
            kept.append(option)
    try:
        linger = parse_duration(own["--linger"]) if "--linger" in own else _LINGER
    except ValueError as error:
        raise Problem(f"--linger={own['--linger']}: {error}") from None
    folder = own.get("--run-folder", "")
    if folder and not folder.startswith("/"):
        raise Problem(f"--run-folder={folder} is not an absolute path")
    return tuple(kept), folder, linger
