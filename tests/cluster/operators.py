"""What the operators' controllers do with an object of theirs, played: the Jobs, services and pods that they would make.

The controllers themselves are no part of the bench; names, labels and variables are those that their own documentation gives.
"""

import copy


def owner_of(item):
    return {
        "apiVersion": item["apiVersion"],
        "kind": item["kind"],
        "name": item["metadata"]["name"],
        "uid": item["metadata"]["uid"],
    }


def _headless(name, labels, item):
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels}
    meta = {"name": name, "labels": item["metadata"]["labels"], "ownerReferences": [owner_of(item)]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec}


def jobset(item):
    """One Indexed Job per replicated job, and a service for the pods' names."""
    name = item["metadata"]["name"]
    (replicated,) = item["spec"]["replicatedJobs"]
    spec = copy.deepcopy(replicated["template"]["spec"])
    mark = {"jobset.sigs.k8s.io/jobset-name": name}
    spec["template"]["metadata"]["labels"].update(mark)
    spec["template"]["spec"]["subdomain"] = item["spec"]["network"]["subdomain"]
    meta = {
        "name": f"{name}-{replicated['name']}-0",
        "labels": {**item["metadata"]["labels"], **mark},
        "ownerReferences": [owner_of(item)],
    }
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec}
    return [_headless(item["spec"]["network"]["subdomain"], mark, item), job]


def trainjob(item):
    """A JobSet of the runtime, with the trainer's own words and the patches; here what that JobSet becomes."""
    name, trainer = item["metadata"]["name"], item["spec"]["trainer"]
    (patch,) = item["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template = copy.deepcopy(replicated["template"]["spec"]["template"])
    template["spec"]["restartPolicy"] = "Never"
    (container,) = template["spec"]["containers"]
    container.update({key: trainer[key] for key in ("image", "command", "env")})
    spec = {
        "completions": trainer["numNodes"],
        "parallelism": trainer["numNodes"],
        "completionMode": "Indexed",
        "backoffLimit": 0,
    }
    made = copy.deepcopy(item)
    made["spec"] = {
        "network": {"subdomain": name},
        "replicatedJobs": [{"name": replicated["name"], "template": {"spec": {**spec, "template": template}}}],
    }
    return jobset(made)


def pytorchjob(item):
    """A pod and a service of the same name for each replica."""
    made = []
    replicas = [
        (kind, number)
        for kind, spec in item["spec"]["pytorchReplicaSpecs"].items()
        for number in range(spec["replicas"])
    ]
    for rank, (kind, number) in enumerate(sorted(replicas)):
        name = f"{item['metadata']['name']}-{kind.lower()}-{number}"
        marks = {"training.kubeflow.org/replica-type": kind.lower(), "training.kubeflow.org/replica-index": str(number)}
        marks["training.kubeflow.org/job-name"] = item["metadata"]["name"]
        template = copy.deepcopy(item["spec"]["pytorchReplicaSpecs"][kind]["template"])
        template["spec"]["restartPolicy"] = "Never"
        lead = f"{item['metadata']['name']}-master-0"
        variables = {"MASTER_ADDR": lead, "MASTER_PORT": "23456", "WORLD_SIZE": str(len(replicas)),
                     "RANK": str(rank), "PET_NODE_RANK": str(rank), "PET_NNODES": str(len(replicas))}  # fmt: skip
        template["spec"]["containers"][0]["env"] += [{"name": key, "value": value} for key, value in variables.items()]
        labels = {**template["metadata"]["labels"], **marks}
        meta = {"name": name, "labels": labels, "ownerReferences": [owner_of(item)]}
        made += [
            _headless(name, marks, item),
            {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]},
        ]
    return made
