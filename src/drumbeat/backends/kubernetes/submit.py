"""Sending a manifest: all of it or nothing. Also taking away what was made for a run."""

from __future__ import annotations

import json
import os
import secrets
from typing import Dict, List, Mapping, Sequence

from drumbeat.backends.contract import Request
from drumbeat.backends.kubernetes.client import Cluster, decoded, handle_of, problem_of
from drumbeat.backends.kubernetes.code import code_secrets, pieces_of, secret_name
from drumbeat.backends.kubernetes.function import function_secret_names, function_secrets
from drumbeat.backends.kubernetes.kinds import RESOURCE
from drumbeat.backends.kubernetes.options import Settings, settings_of
from drumbeat.backends.kubernetes.payload import as_text, packed
from drumbeat.backends.kubernetes.pod import RUN_LABEL, TOKEN, Plain, labels_of, program_name
from drumbeat.backends.kubernetes.render import MANIFEST, object_name
from drumbeat.backends.kubernetes.script import PACKED, pod_folder
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.bundle.build import cached_bundle
from drumbeat.runfolder.write import replace

_SHARED = "ReadWriteMany"
_SENDING = 120.0  # seconds: half a megabyte over a slow line


def submit(request: Request, environ: Mapping[str, str]) -> str:
    order = request.order
    settings = settings_of(order)
    cluster = Cluster(environ, settings.context, settings.namespace).settled()
    name = object_name(order.run_id)
    text = request.text.encode()
    hidden = json.dumps(_secret(order, name, environ)).encode()
    program = json.dumps(_program(name, environ)).encode()
    sent = [*code_secrets(order, name, labels_of(name)), *function_secrets(order, name, labels_of(name))]
    check_claims(cluster, order, settings)
    cluster.call("create", "--dry-run=server", "-f", "-", stdin=text)  # refused: nothing is there yet
    replace(os.path.join(order.folder, MANIFEST), request.text)
    try:
        for part in (hidden, program, *(json.dumps(secret).encode() for secret in sent)):
            cluster.call("create", "-f", "-", stdin=part, seconds=_SENDING)
        created = _items(cluster.call("create", "-f", "-", "-o", "json", stdin=text, seconds=_SENDING))
        _check_kept(created)
    except Problem as refused:
        raise _take_back(cluster, name, refused) from None
    _adopt(cluster, created, name, order)
    return handle_of(cluster, name)


def _secret(order: Order, name: str, environ: Mapping[str, str]) -> Plain:
    """By the token the agents of this run know each other. It goes through a pipe, never through an argument."""
    values = {TOKEN: secrets.token_hex(32), **passed_values(order, environ)}
    meta = {"name": name, "labels": labels_of(name)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "stringData": values}


def passed_values(order: Order, environ: Mapping[str, str]) -> Dict[str, str]:
    """The variables that are handed on by name. A secret holds text alone."""
    for variable in order.passed:
        if variable not in environ:
            raise Problem(f"{variable} is to be passed on, but it is not exported here", f"export {variable}=...")
        try:
            environ[variable].encode("utf-8")
        except UnicodeEncodeError:
            raise Problem(f"{variable} is to be passed on, but its value is not UTF-8 text", "hand on text") from None
    return {variable: environ[variable] for variable in order.passed}


def _program(name: str, environ: Mapping[str, str]) -> Plain:
    data = {PACKED: as_text(packed(cached_bundle(environ)))}
    meta = {"name": program_name(name), "labels": labels_of(name)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "binaryData": data}


def check_claims(cluster: Cluster, order: Order, settings: Settings) -> None:
    """Every claim must be there, and the one with the run folder must be writable from all nodes."""
    folder = pod_folder(order, settings)
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


def _check_kept(created: Sequence[Plain]) -> None:
    """An API server drops fields that it does not know without a word."""
    for item in created:
        spec = item.get("spec", {})
        if item.get("kind") == "Job" and spec.get("completions", 1) > 1 and spec.get("completionMode") != "Indexed":
            raise Problem(
                "this API server has dropped completionMode from the Job: it knows no Indexed Jobs",
                "--kind=jobs makes one Job per node",
            )


def _adopt(cluster: Cluster, created: Sequence[Plain], name: str, order: Order) -> None:
    """Whoever deletes the job also deletes what belongs to it. Without the right to change objects, `drumbeat cancel` and
    the end of the run do that."""
    owners = [item for item in created if item.get("kind") not in ("ConfigMap", "Service")]
    if not owners:
        return
    owner = owners[0]
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
    }
    patch = json.dumps({"metadata": {"ownerReferences": [reference]}})
    own = [f"configmap/{name}", f"configmap/{program_name(name)}", f"secret/{name}"]
    own += [f"secret/{secret_name(name, piece)}" for piece in pieces_of(order)]
    own += [f"secret/{secret}" for secret in function_secret_names(order, name)]
    own += [f"service/{name}" for item in created if item.get("kind") == "Service"]
    own += [f"{RESOURCE['jobs']}/{item['metadata']['name']}" for item in owners[1:]]
    cluster.try_call("patch", *own, "--type=merge", "-p", patch)


def remove(cluster: Cluster, name: str) -> bool:
    """Everything that carries the run's label; pods go with the objects that made them. Whether there was anything. A Problem
    where the cluster does not let anything be removed."""
    known = set(cluster.try_call("api-resources", "-o", "name", "--verbs=delete").stdout.decode().split())
    kinds = [RESOURCE["job"], *(kind for kind in dict.fromkeys(RESOURCE.values()) if kind in known - {RESOURCE["job"]})]
    what = ",".join((*kinds, "services", "configmaps", "secrets"))
    words = ("-l", f"{RUN_LABEL}={name}", "--ignore-not-found", "--wait=false", "-o", "name")
    done = [cluster.try_call("delete", what, *words)]
    if done[0].returncode != 0:  # one kind that may not be touched must not keep the others
        done = [cluster.try_call("delete", kind, *words) for kind in what.split(",")]
    if all(each.returncode for each in done):
        raise problem_of(done[-1].stderr.decode("utf-8", "replace"), cluster.namespace)
    return any(each.stdout.strip() for each in done)


def _take_back(cluster: Cluster, name: str, refused: Problem) -> Problem:
    """The job was refused half way: what is there goes; where even that fails, how to do it by hand is said."""
    try:
        remove(cluster, name)
    except Problem as left:
        by_hand = f"kubectl delete jobs,services,configmaps,secrets -n {cluster.namespace} -l {RUN_LABEL}={name}"
        return Problem(f"{refused.what}; what was sent before could not be removed ({left.what})", f"later: {by_hand}")
    return refused


def _items(answer: bytes) -> List[Plain]:
    """kubectl prints one object, a List, or one object after the other."""
    text, decoder = answer.decode("utf-8", "replace").strip(), json.JSONDecoder()
    found: List[Plain] = []
    while text:
        try:
            item, end = decoder.raw_decode(text)
        except ValueError:
            break
        found += item.get("items", [item]) if isinstance(item, dict) else []
        text = text[end:].lstrip()
    return found
