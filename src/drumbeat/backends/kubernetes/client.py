"""Talking to Kubernetes through `kubectl` and the user's own kubeconfig, each call with a deadline."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any, Dict, List, Mapping, Optional, Sequence
from urllib.parse import quote, unquote

from drumbeat.backends.contract import Handle, ask_tool, complaint, parse_handle, text_of
from drumbeat.backends.kubernetes.options import check_namespace
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem

_SECONDS = 30.0
_NOISE = (
    r"^(?:(?:Warning:|W1|I1).*|(?:error: |Error from server(?: \(\w+\))?: |E\d{4} .*?\] )?"
    r"(?:error when creating \"[^\"]*\": )?)"
)
_SHOWN = "drumbeat plan --render JOB.yaml shows what was sent"


@dataclass(frozen=True)
class Cluster:
    """A namespace of a cluster; empty names mean kubectl's own defaults."""

    environ: Mapping[str, str]
    context: str = ""
    namespace: str = ""

    def argv(self, *words: str) -> List[str]:
        where = [f"--context={self.context}"] if self.context else []
        where += [f"--namespace={self.namespace}"] if self.namespace else []
        return ["kubectl", *where, *words]

    def call(self, *words: str, stdin: Optional[bytes] = None, seconds: float = _SECONDS) -> bytes:
        """Call kubectl and return its standard output; raise a Problem with its error message if it fails."""
        done = self.try_call(*words, stdin=stdin, seconds=seconds)
        if done.returncode != 0:
            raise problem_of(text_of(done.stderr), self.namespace)
        return done.stdout

    def try_call(
        self, *words: str, stdin: Optional[bytes] = None, seconds: float = _SECONDS
    ) -> subprocess.CompletedProcess[bytes]:
        silent = "is the cluster reachable from here? try again"
        missing = "install it, or put it on your PATH"
        return ask_tool(self.argv(*words), self.environ, missing, silent, seconds, input=stdin or b"")

    def get(self, *words: str) -> Dict[str, Any]:
        """Get an object or a list of them."""
        return decoded(self.call("get", *words, "-o", "json"))

    def list(self, *words: str) -> List[Dict[str, Any]]:
        items = self.get(*words).get("items")
        return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []

    def settled(self) -> Cluster:
        """Fill in kubectl's current defaults, so that a handle still means the same cluster tomorrow."""
        context = self.context or self.call("config", "current-context").decode().strip()
        namespace = self.namespace or check_namespace(self._default_namespace(context)) or "default"
        return Cluster(self.environ, context, namespace)

    def _default_namespace(self, context: str) -> str:
        for entry in decoded(self.call("config", "view", "-o", "json")).get("contexts") or ():
            if isinstance(entry, dict) and entry.get("name") == context:
                return str((entry.get("context") or {}).get("namespace") or "")
        return ""


def decoded(data: bytes) -> Dict[str, Any]:
    """Return the JSON object that kubectl printed; {} for anything else."""
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def handle_of(cluster: Cluster, name: str) -> str:
    """Return kubernetes://NAMESPACE@CONTEXT/NAME; contexts may hold any character."""
    return str(Handle("kubernetes", f"{cluster.namespace}@{quote(cluster.context, safe='')}", name))


def read_handle(handle: str, environ: Mapping[str, str]) -> tuple[Cluster, str]:
    parsed = parse_handle(handle)
    if parsed is None or "@" not in parsed.cluster:
        raise Problem(f"{handle!r} is not a job of Kubernetes", "it looks like kubernetes://NAMESPACE@CONTEXT/NAME")
    namespace, _, context = parsed.cluster.partition("@")
    return Cluster(environ, unquote(context), namespace), parsed.id


def problem_of(stderr: str, namespace: str = "") -> Problem:
    """Turn kubectl's complaint into one line with what to do."""
    text = complaint(stderr, _NOISE)
    for pattern, words, fix in _COMPLAINTS:
        match = re.search(pattern, text, re.IGNORECASE | re.DOTALL)
        if match:
            named = {key: (value or "") for key, value in match.groupdict().items()}
            named.setdefault("namespace", namespace or "default")
            return Problem(words.format(**named), fix.format(**named))
    return Problem(f"Kubernetes refuses: {text[:400] or 'it does not say why'}", _SHOWN)


# Pattern, message, fix. `{...}` are the pattern's own groups.
_COMPLAINTS: Sequence[tuple[str, str, str]] = (
    (
        r"connection to the server localhost:8080 was refused|no configuration has been provided"
        r"|current-context is not set|invalid configuration",
        "there is no kubeconfig here that leads to a cluster",
        "export KUBECONFIG=/path/to/config, or put it at ~/.kube/config; kubectl config get-contexts shows what is known",
    ),
    (
        r"error loading config file \"(?P<file>[^\"]+)\": (?P<why>.*)",
        "your kubeconfig {file} cannot be read: {why}",
        "correct it, or export KUBECONFIG=/path/to/another; kubectl config view must work",
    ),
    (
        r"executable (?P<program>\S+) not found",
        "your kubeconfig logs in with {program}, which is not installed here",
        "install it, or put it on your PATH; kubectl version must work",
    ),
    (
        r"context \"(?P<context>[^\"]+)\" does not exist|no context exists with the name: \"(?P<name>[^\"]+)\""
        r"|context was not found for specified context: (?P<other>\S+)",
        "your kubeconfig has no context {context}{name}{other}",
        "kubectl config get-contexts lists them; --context=NAME among submit-options chooses one",
    ),
    (
        r"namespaces? \"(?P<namespace>[^\"]+)\" not found",
        "the cluster has no namespace {namespace}",
        "kubectl get namespaces lists them; account: NAME in the job file, or --account, chooses one",
    ),
    (
        r"(?P<what>\S+) \"[^\"]*\" is forbidden: exceeded quota: (?P<quota>[^,]+),(?P<rest>.*)",
        "the quota {quota} of namespace {namespace} does not allow it:{rest}",
        "ask for less, wait until others have ended, or ask for a larger quota: kubectl describe quota",
    ),
    (
        r"user \"(?P<user>[^\"]*)\" cannot (?P<verb>\w+) resource \"(?P<what>[^\"]+)\"",
        "you ({user}) may not {verb} {what} in namespace {namespace}",
        "ask the cluster's support for the right to {verb} {what} there; kubectl auth can-i --list shows your rights",
    ),
    (
        r"You must be logged in to the server|Unauthorized|expired",
        "the cluster does not accept your login",
        "log in again, or renew the token in your kubeconfig",
    ),
    (
        r"Unable to connect to the server: (?P<why>.*)|dial tcp (?P<address>\S+): (?P<reason>.*)"
        r"|(?P<refused>connection to the server \S+ was refused)",
        "the cluster cannot be reached from here: {why}{reason}{refused}",
        "is the VPN up? kubectl config view shows the address",
    ),
    (
        r"no matches for kind \"(?P<kind>[^\"]+)\"",
        "this cluster has no {kind}",
        "leave --kind and --scheduler out: drumbeat then takes what the cluster offers",
    ),
    (
        r"already exists",
        "an object of that name is there already",
        "make a new order: drumbeat plan",
    ),
)  # fmt: skip
