"""Manifests of every kind, for the tests that look at them."""

import json

from drumbeat.backends.kubernetes.submit import render
from drumbeat.jobfile.job import job_from_text
from drumbeat.jobfile.resolve import Here, resolve
from drumbeat.jobfile.site import site_from_text

KINDS = ("jobset", "trainjob", "pytorchjob", "job", "jobs")

SITE = """
summary: a cluster with everything
backend: kubernetes
vendor: nvidia
gpus: 8
cores: 96
memory: 1800G
container: {runtime: pod}
submit:
  roce: {value: --annotation k8s.v1.cni.cncf.io/networks=kube-system/roce, why: gives the pod its RoCE interface}
  rdma: {value: --resource rdma/hca=1, why: gives the pod its RDMA devices}
  pool: {value: --node-selector pool=h200, why: the GPU nodes}
  taint: {value: "--toleration nvidia.com/gpu:NoSchedule", why: GPU nodes are tainted}
  scratch: {value: "--pvc scratch:/scratch", why: shared by all nodes}
  data: {value: "--pvc data:/data:ro", why: data sets}
  runs: {value: --run-folder=/scratch/runs, why: outlives the pods}
  user: {value: "--user=1000:100", why: the owner of the files on scratch}
  lock: {value: --capability IPC_LOCK, why: RDMA pins memory}
  pull: {value: --pull-secret registry, why: the team's registry needs a login}
  shm: {value: --shm=64Gi, why: enough for data loaders}
"""
JOB = """
name: llama3_8B
nodes: 2
command: torchrun train.py --batch-size 2048
workdir: /scratch/code
container: registry.example.org/team/train:1
account: team-a
partition: training
qos: high
time: 1h
env: {HF_HOME: /scratch/hf, HF_TOKEN: pass}
"""
# Every option of pods that the site above does not use, and binds of both kinds.
OPTIONS = (
    "--label team=a", "--service-account=trainer", "--scheduler=volcano", "--runtime-class=nvidia", "--linger=5m", "--keep=2d",
    "--muster=30m", "--context=bench", "--runtime=torch-distributed", "--toleration dedicated=training:NoExecute",
    "--toleration spot", "--resource ephemeral-storage=40Gi", "--resource memory=900Gi",
)  # fmt: skip
EVERYTHING = (
    JOB
    + f"submit-options: {json.dumps(OPTIONS)}\nbinds: [/opt/data:/in:ro, /opt/tools]\ncpus: 12\nmemory: 800G\nrequeues: 3\n"
)
_RUNTIMES_OWN = ("--scheduler", "--runtime-class")  # what a TrainJob leaves to its runtime


def order_of(job=JOB, site=SITE):
    environ = {"HOME": "/home/ada", "HF_TOKEN": "hf_never_shown"}
    here = Here("laptop", "/home/ada/code", environ, 8, None, "ada", 1.7e9, "golden")
    return resolve(job_from_text(job), site_from_text(site, "everything", "everything.yaml"), here)


def manifest(kind, version=(1, 31), job=JOB, site=SITE):
    return request(kind, version, job, site).text


def request(kind, version=(1, 31), job=JOB, site=SITE):
    if kind == "trainjob":
        job = job.replace("qos: high\n", "")  # the runtime's own counts
        for option in OPTIONS:
            if option.startswith(_RUNTIMES_OWN):
                job = job.replace(f'"{option}", ', "")
    return render(order_of(job, site), kind, "as the test says", version)
