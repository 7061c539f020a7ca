"""Submit a manifest as a whole or not at all, and delete the objects of a run."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
import secrets
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import yaml

from drumbeat import __version__
from drumbeat.backends.contract import Request
from drumbeat.backends.kubernetes import pod
from drumbeat.backends.kubernetes.client import Cluster, decoded, handle_of, problem_of
from drumbeat.backends.kubernetes.options import Settings, settings_of
from drumbeat.base.order import FUNCTION, Order, dump_order
from drumbeat.base.problem import Problem
from drumbeat.bundle.build import cached_bundle, cached_payload
from drumbeat.runfolder.files import replace

# The manifest: the text that `plan --render` shows and that `submit` sends, byte for byte. Two things are not in it,
# and it names them: the secret (the run's token and the values of variables that are passed on) and the config map
# with drumbeat.pyz. Both are made at submit.


MANIFEST = "manifest.yaml"
_LONGEST = 45  # characters: a pod's host name is the object's with up to 18 more, and may have 63
_UNIQUE = 21  # of a run id: -YYYYmmdd-HHMMSS-abcd


def object_name(run_id: str) -> str:
    """Turn the run id into a DNS label; its end makes it unique."""
    text = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")
    if not text[:1].isalpha():
        text = f"r-{text}"
    if len(text) > _LONGEST:
        text = text[: _LONGEST - _UNIQUE].rstrip("-") + text[-_UNIQUE:]
    return text


def render(order: Order, kind: str, why: str, version: Tuple[int, int]) -> Request:
    """Render the manifest. `kind`, its reason `why` and the API server's `version` are determined by the caller."""
    check(order)
    settings = settings_of(order)
    name = object_name(order.run_id)
    documents = [
        _files(order, settings, name, kind), *pod.objects(pod.PodRequest(order, settings, name, kind, version))
    ]  # fmt: skip
    for document in documents if settings.namespace else ():
        document["metadata"] = {"namespace": settings.namespace, **document["metadata"]}
    text = _header(order, name, kind, why) + "".join("---\n" + dump(document) for document in documents)
    return Request("kubernetes", order, text)


def check(order: Order) -> None:
    if order.container is None:
        raise Problem(
            "a pod is made from an image, and the job names none",
            "write container: registry.example.org/team/image:tag in the job file, or --container",
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,499}", order.container.image):
        raise Problem(
            f"container: {order.container.image[:80]!r} is not the name of an image",
            "write it as its registry calls it: registry.example.org/team/image:tag",
        )
    if order.launcher == "tasks":
        raise Problem(
            "launcher: tasks needs a scheduler that starts one task per rank, and a pod is a node", "leave it out"
        )
    if order.resources.array:
        raise Problem("arrays are not submitted to Kubernetes", "submit the job once for each value")
    if order.modules:
        raise Problem("a pod has no environment modules", "put what they bring into the image; leave modules out")
    pod.check_code(order)


def sent_order(order: Order, settings: Settings) -> Order:
    """Return the order for pods: with their path of the run folder, and a muster timeout that leaves time to pull images."""
    timing = dataclasses.replace(order.timing, muster=float(settings.muster))
    workdir = pod.inside(order, pod.LOCAL) if order.code == "sync" else order.workdir
    return dataclasses.replace(order, folder=pod.pod_folder(order, settings), workdir=workdir, timing=timing)


def _files(order: Order, settings: Settings, name: str, kind: str) -> pod.Plain:
    """Return the config map with the order and the script; its annotations are what status, logs and cancel need later."""
    notes = {
        "drumbeat/kind": kind,
        "drumbeat/nodes": str(order.nodes),
        "drumbeat/folder": pod.pod_folder(order, settings),
        "drumbeat/shared": "yes" if settings.claim_of(pod.pod_folder(order, settings)) else "no",
        "drumbeat/python": pod.python_of(order),
    }
    data = {"order.json": dump_order(sent_order(order, settings)), pod.SCRIPT: pod.pod_script(order, settings)}
    made = pod.manifest("ConfigMap", name, pod.labels_of(name), data=data)
    made["metadata"]["annotations"] = notes
    return made


def _header(order: Order, name: str, kind: str, why: str) -> str:
    secrets = ", ".join((pod.TOKEN, *order.passed))
    deadline = pod.deadline_of(order, settings_of(order))
    lines = [
        f"Written by drumbeat {__version__} for run {order.run_id}: `drumbeat submit` sends exactly this text.",
        f"kind {kind}: {why}",
        f"Made at submit and not shown: Secret {name} ({secrets}), ConfigMap {pod.program_name(name)} ({pod.PACKED}).",
        *_about_code(order, name),
        *([f"Also Secret {name}-call: the function and its arguments."] if FUNCTION in order.brings else []),
        *([f"activeDeadlineSeconds {deadline[0]}: {deadline[1]}."] if deadline and kind != "trainjob" else []),
        *(f"{option.text}: {option.why}" for option in order.resources.options),
    ]
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)


def _about_code(order: Order, name: str) -> List[str]:
    pieces = pod.pieces_of(order)
    if not pieces:
        return []
    last = f" to {name}-{pieces[-1]}" if len(pieces) > 1 else ""
    sent = f"{order.code_bytes:,} bytes packed, sha256 {order.code_digest}"
    return [f"Also Secret {name}-{pieces[0]}{last}: the code of {order.code_root}, {sent}."]


class _Dumper(yaml.SafeDumper):
    """YAML dumper for readable output: texts of several lines as blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_OTHER_BREAKS = {"\x85", "\u2028", "\u2029", "\ufeff"}  # YAML changes these in a block, and escapes them in quotes


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text and not _OTHER_BREAKS & set(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump(document: pod.Plain) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=4000, allow_unicode=True)


def documents_of(text: str) -> List[pod.Plain]:
    return [document for document in yaml.safe_load_all(text) if document]


_SHARED = "ReadWriteMany"
_SENDING = 120.0  # seconds: half a megabyte over a slow line


def submit(request: Request, environ: Mapping[str, str]) -> str:
    order = request.order
    settings = settings_of(order)
    cluster = Cluster(environ, settings.context, settings.namespace).settled()
    name = object_name(order.run_id)
    text = request.text.encode()
    labels = pod.labels_of(name)
    # The token by which the agents of this run authenticate each other. It is sent through a pipe, never as an argument.
    values = {pod.TOKEN: secrets.token_hex(32), **passed_values(order, environ)}
    program = {pod.PACKED: base64.b64encode(cached_payload(cached_bundle(environ), environ)).decode()}
    parts = [
        pod.manifest("Secret", name, labels, type="Opaque", stringData=values),
        pod.manifest("ConfigMap", pod.program_name(name), labels, binaryData=program),
        *pod.file_secrets(order, name),
    ]
    sent = [json.dumps(part).encode() for part in parts]
    check_claims(cluster, order, settings)
    cluster.call("create", "--dry-run=server", "-f", "-", stdin=text)  # if this is refused, nothing has been created
    replace(os.path.join(order.folder, MANIFEST), request.text)
    try:
        for part in sent:
            cluster.call("create", "-f", "-", stdin=part, seconds=_SENDING)
        created = _items(cluster.call("create", "-f", "-", "-o", "json", stdin=text, seconds=_SENDING))
        for item in created:  # the API server silently drops fields that it does not know
            spec = item.get("spec", {})
            if item.get("kind") == "Job" and spec.get("completions", 1) > 1 and spec.get("completionMode") != "Indexed":
                raise Problem(
                    "this API server has dropped completionMode from the Job: it knows no Indexed Jobs",
                    "--kind=jobs makes one Job per node",
                )
    except Problem as refused:
        try:
            remove(cluster, name)
        except Problem as left:
            by_hand = (
                f"kubectl delete jobs,services,configmaps,secrets -n {cluster.namespace} -l {pod.RUN_LABEL}={name}"
            )
            words = f"{refused.what}; what was sent before could not be removed ({left.what})"
            raise Problem(words, f"later: {by_hand}") from None
        raise
    _adopt(cluster, created, name, order)
    return handle_of(cluster, name)


def passed_values(order: Order, environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables that are passed by name. A secret holds text only."""
    for variable in order.passed:
        if variable not in environ:
            raise Problem(f"{variable} is to be passed on, but it is not exported here", f"export {variable}=...")
        try:
            environ[variable].encode("utf-8")
        except UnicodeEncodeError:
            raise Problem(f"{variable} is to be passed on, but its value is not UTF-8 text", "hand on text") from None
    return {variable: environ[variable] for variable in order.passed}


def check_claims(cluster: Cluster, order: Order, settings: Settings) -> None:
    """Check that every claim exists, and that the one with the run folder is writable from all nodes."""
    folder = pod.pod_folder(order, settings)
    holder = settings.claim_of(folder)
    if settings.run_folder and holder is None:
        raise Problem(
            f"--run-folder={settings.run_folder} is on no claim of this job",
            "add --pvc CLAIM:PATH with a PATH above it",
        )
    for claim in settings.claims:
        done = cluster.try_call("get", "persistentvolumeclaim", claim.name, "-o", "json")
        if done.returncode != 0:
            stderr = done.stderr.decode("utf-8", "replace")
            if f'persistentvolumeclaims "{claim.name}" not found' not in stderr:
                raise problem_of(stderr, cluster.namespace)
            raise Problem(
                f"namespace {cluster.namespace} has no volume claim {claim.name}", "kubectl get pvc lists them"
            )
        modes = decoded(done.stdout).get("spec", {}).get("accessModes") or []
        if claim is holder and order.nodes > 1 and _SHARED not in modes:
            raise Problem(
                f"the run folder is on the claim {claim.name}, which only one node may write ({', '.join(modes)})",
                f"take a claim with {_SHARED}, or leave --run-folder out: the run folder is then fetched from the pods",
            )


def _adopt(cluster: Cluster, created: Sequence[pod.Plain], name: str, order: Order) -> None:
    """Make the run's objects belong to the job, so that deleting it deletes them. Without the right to change objects,
    `drumbeat cancel` and the end of the run delete them."""
    owners = [item for item in created if item.get("kind") not in ("ConfigMap", "Service", "PodGroup")]
    if not owners:
        return
    owner = owners[0]
    reference = {key: owner[key] for key in ("apiVersion", "kind")}
    reference.update((key, owner["metadata"][key]) for key in ("name", "uid"))
    patch = json.dumps({"metadata": {"ownerReferences": [reference]}})
    own = [f"configmap/{name}", f"configmap/{pod.program_name(name)}", f"secret/{name}"]
    own += [f"secret/{secret}" for secret in pod.secrets_of(order, name)]
    own += [f"service/{name}" for item in created if item.get("kind") == "Service"]
    own += [f"{pod.POD_GROUP}/{name}" for item in created if item.get("kind") == "PodGroup"]
    own += [f"{pod.RESOURCE['jobs']}/{item['metadata']['name']}" for item in owners[1:]]
    cluster.try_call("patch", *own, "--type=merge", "-p", patch)


def remove(cluster: Cluster, name: str) -> bool:
    """Delete everything that carries the run's label; pods are deleted with the objects that made them. Return true if there was
    anything; raise a Problem if the cluster does not allow deletion."""
    known = set(cluster.try_call("api-resources", "-o", "name", "--verbs=delete").stdout.decode().split())
    others = dict.fromkeys((*pod.RESOURCE.values(), pod.POD_GROUP))
    kinds = [pod.RESOURCE["job"], *(kind for kind in others if kind in known - {pod.RESOURCE["job"]})]
    what = ",".join((*kinds, "services", "configmaps", "secrets"))
    words = ("-l", f"{pod.RUN_LABEL}={name}", "--ignore-not-found", "--wait=false", "-o", "name")
    done = [cluster.try_call("delete", what, *words)]
    if done[0].returncode != 0:  # a kind that may not be deleted must not keep the other kinds
        done = [cluster.try_call("delete", kind, *words) for kind in what.split(",")]
    if all(each.returncode for each in done):
        raise problem_of(done[-1].stderr.decode("utf-8", "replace"), cluster.namespace)
    return any(each.stdout.strip() for each in done)


def _items(answer: bytes) -> List[pod.Plain]:
    """Yield the objects in kubectl's output: one object, a List, or several objects in a row."""
    text, decoder = answer.decode("utf-8", "replace").strip(), json.JSONDecoder()
    found: List[pod.Plain] = []
    while text:
        try:
            item, end = decoder.raw_decode(text)
        except ValueError:
            break
        found += item.get("items", [item]) if isinstance(item, dict) else []
        text = text[end:].lstrip()
    return found
