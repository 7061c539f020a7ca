"""A stand-in for `kubectl` with a small cluster behind it: objects are files in $STAND_IN, and the pods of an Indexed Job are
processes of this machine that run the script of the manifest, word for word but for its paths. tests/cluster has the real thing.
"""

import base64
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys

FOLDER = os.environ.get("STAND_IN", "")
ADDRESSES = ("127.0.0.1", "127.0.0.2")


def main(words):
    with open(os.path.join(FOLDER, "calls.jsonl"), "a") as file:
        file.write(json.dumps(words) + "\n")
    words = [word for word in words if not word.startswith(("--context=", "--namespace="))]
    if os.environ.get("STAND_IN_REFUSES") and words[0] == "create" and "--dry-run=server" not in words:
        refused = get("refuses") or 0
        put("refuses", refused + 1)
        if refused + 1 == int(os.environ["STAND_IN_REFUSES"]):
            raise SystemExit(
                'Error from server (Forbidden): User "ada" cannot create resource "jobs" in API group "batch"'
            )
    if os.environ.get("STAND_IN_KILLS") and words[0] == "create" and "--dry-run=server" not in words:
        put("kills", (get("kills") or 0) + 1)
        if get("kills") == int(os.environ["STAND_IN_KILLS"]):
            os.kill(os.getppid(), signal.SIGKILL)  # the desk, in the middle of a submit
    return {"version": version, "api-resources": resources, "auth": may, "config": config, "create": create, "get": get_objects,
            "exec": execute, "logs": logs, "delete": delete, "patch": lambda words: None}[words[0]](words[1:])  # fmt: skip


def version(words):
    print(json.dumps({"serverVersion": {"major": "1", "minor": os.environ.get("STAND_IN_MINOR", "31")}}))


def resources(words):
    print("configmaps\nsecrets\nservices\njobs.batch")


def may(words):
    print("no")


def config(words):
    contexts = [{"name": "bench", "context": {"namespace": "team"}}]
    print("bench" if words[0] == "current-context" else json.dumps({"contexts": contexts}))


def documents(text):
    """Parse manifests, with libyaml where it is there: the payload in them takes plain Python seconds."""
    import yaml  # not needed by the other commands, which are called often: it takes half of their time

    return yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def create(words):
    for item in documents(sys.stdin.read()):
        if item is None or "--dry-run=server" in words:
            continue
        item["metadata"]["uid"] = "1"
        put(f"{item['kind']}-{item['metadata']['name']}", item)
        if "-o" in words:
            print(json.dumps(item))
        if item["kind"] == "Job" and not os.environ.get("STAND_IN_HOLDS"):
            for node in range(item["spec"]["completions"]):
                start_pod(item["metadata"]["name"], node)


def start_pod(name, node):
    """As the Job's controller and a kubelet would; again where a pod has been lost."""
    pod = get(f"Job-{name}")["spec"]["template"]["spec"]
    spec = pod["containers"][0]
    number = 0
    while os.path.exists(os.path.join(FOLDER, pod_name(name, node, number))):
        number += 1
    folder = os.path.join(FOLDER, pod_name(name, node, number))
    os.makedirs(os.path.join(folder, "files"))
    os.makedirs(os.path.join(folder, "run"))
    files = get(f"ConfigMap-{name}")["data"]
    for file, text in files.items():
        with open(os.path.join(folder, "files", file), "w") as out:
            out.write(inside(text, folder))
    packed = get(f"ConfigMap-{name}-program")["binaryData"]["drumbeat.pyz.xz"]
    with open(os.path.join(folder, "files", "drumbeat.pyz.xz"), "wb") as out:
        out.write(base64.b64decode(packed))
    (volume,) = [each for each in pod["volumes"] if each["name"] == "drumbeat"]
    for source in volume["projected"]["sources"]:
        for file, text in (get(f"Secret-{source['secret']['name']}")["data"] if "secret" in source else {}).items():
            with open(os.path.join(folder, "files", file), "wb") as out:
                out.write(base64.b64decode(text))
    secret = get(f"Secret-{name}")["stringData"]
    environ = {"PATH": os.environ["PATH"], "HOME": folder, "LANG": "C.UTF-8", "JOB_COMPLETION_INDEX": str(node)}
    for variable in spec["env"]:
        reference = variable.get("valueFrom", {}).get("secretKeyRef")
        environ[variable["name"]] = secret[reference["key"]] if reference else variable["value"]
    environ["DRUMBEAT_HOSTS"] = ",".join(ADDRESSES[: len(environ["DRUMBEAT_HOSTS"].split(","))])
    command = shlex.join(inside(word, folder) for word in spec["command"])
    with open(os.path.join(folder, "out"), "wb") as out:
        wrapped = f"{command} & echo $! > {folder}/pid; wait $!; echo $? > {folder}/code"
        subprocess.Popen(["sh", "-c", wrapped], env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                         start_new_session=True)  # fmt: skip


def inside(text, folder):
    return text.replace("/drumbeat-run", f"{folder}/run").replace("/drumbeat/", f"{folder}/files/")


def pod_name(name, node, number):
    return f"Pod-{name}-{node}-{number}"


def kill_pod(name, node, replace=True):
    """A pod that is deleted: all its processes go, and the controller makes another one."""
    folder = newest_pod(name, node)
    for pid in processes_of(folder):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    shutil.rmtree(folder, ignore_errors=True)
    if replace:
        start_pod(name, node)


def newest_pod(name, node):
    return os.path.join(
        FOLDER, sorted(each for each in os.listdir(FOLDER) if each.startswith(f"Pod-{name}-{node}-"))[-1]
    )


def processes_of(folder):
    """Not all of a pod's have its environment: its first one, of which the kernel shows none for a moment, is in a file."""
    mark = f"HOME={folder}".encode()
    found = [int(read(os.path.join(folder, "pid")))]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.append(int(pid))
        except OSError:
            pass
    return found


def kill_agent(name, node):
    """Guard and agent are killed at once, as a memory limit may do it; the pod's script lives."""
    for pid in processes_of(newest_pod(name, node)):
        if "_agent" in read(f"/proc/{pid}/cmdline").split("\0"):  # empty for one that has just ended
            os.kill(pid, signal.SIGKILL)


def pods():
    for each in sorted(os.listdir(FOLDER)):
        if each.startswith("Pod-"):
            code = read(os.path.join(FOLDER, each, "code"))
            name, node, number = each[4:].rsplit("-", 2)
            ended = {"terminated": {"exitCode": int(code)}} if code else {"running": {}}
            phase = "Running" if not code else "Succeeded" if code == "0" else "Failed"
            meta = {"name": f"{name}-{node}-{number}", "creationTimestamp": f"2026-01-01T00:00:0{number}Z",
                    "annotations": {"batch.kubernetes.io/job-completion-index": node}}  # fmt: skip
            yield {"metadata": meta, "spec": {"hostname": f"{name}-{node}"}, "status": {"phase": phase,
                   "containerStatuses": [{"state": ended}]}}  # fmt: skip


def get_objects(words):
    what = words[0]
    if what == "configmap":
        item = get(f"ConfigMap-{words[1]}")
        if item is None:
            raise SystemExit(f'Error from server (NotFound): configmaps "{words[1]}" not found')
        print(json.dumps(item))
    elif what == "pods":
        print(json.dumps({"items": list(pods())}))
    elif what.startswith("jobs"):
        print(json.dumps({"items": [job_with_status(each) for each in os.listdir(FOLDER) if each.startswith("Job-")]}))
    else:
        print(json.dumps({"items": []}))


def job_with_status(file):
    codes = [read(os.path.join(FOLDER, each, "code")) for each in os.listdir(FOLDER) if each.startswith("Pod-")]
    conditions = []
    if any(code not in ("", "0", "137", "143") for code in codes):  # those are replaced, as the Job's policy says
        conditions = [{"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}]
    elif codes and all(codes):
        conditions = [{"type": "Complete", "status": "True"}]
    return {**get(file), "status": {"conditions": conditions}}


def execute(words):
    folder = os.path.join(FOLDER, "Pod-" + words[1])
    if read(os.path.join(folder, "code")):
        raise SystemExit("error: cannot exec into a container in a completed pod")
    argv = [inside(word, folder) for word in words[words.index("--") + 1 :]]
    raise SystemExit(subprocess.call(argv))


def logs(words):
    print(read(os.path.join(FOLDER, "Pod-" + words[0], "out")))


def delete(words):
    for each in sorted(os.listdir(FOLDER)):
        if each.startswith("Job-"):
            name, nodes = each[4:], get(each)["spec"]["completions"]
            for node in range(nodes):
                if any(pod.startswith(f"Pod-{name}-{node}-") for pod in os.listdir(FOLDER)):
                    kill_pod(name, node, replace=False)
    for each in os.listdir(FOLDER):
        if each.startswith(("Job-", "ConfigMap-", "Secret-", "Service-")):
            print(each)
            os.unlink(os.path.join(FOLDER, each))


def put(name, value):
    with open(os.path.join(FOLDER, name + ".new"), "w") as file:
        json.dump(value, file)
    os.replace(os.path.join(FOLDER, name + ".new"), os.path.join(FOLDER, name))


def get(name):
    text = read(os.path.join(FOLDER, name))
    return json.loads(text) if text else None


def read(path):
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    main(sys.argv[1:])
