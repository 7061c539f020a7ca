from drumbeat.facts.model import Facts, Cpus
def gather(host):
    return Facts(host.hostname(), cpus=Cpus(allowed=host.affinity(), online=host.affinity()))
def gather_gpus(host): return ()
