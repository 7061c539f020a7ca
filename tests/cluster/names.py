"""The cluster's name server: dnsmasq, fed from the Endpoints of headless services. Run as a program in the head's namespace.

names.py KUBECONFIG FOLDER ADDRESS
"""

import json
import os
import signal
import subprocess
import sys
import time


def hosts(kubeconfig: str) -> str:
    argv = ["kubectl", f"--kubeconfig={kubeconfig}", "get", "endpoints", "--all-namespaces", "-o", "json"]
    done = subprocess.run(argv, capture_output=True, check=False, timeout=20)
    lines = []
    for item in json.loads(done.stdout)["items"] if done.returncode == 0 else ():
        service, namespace = item["metadata"]["name"], item["metadata"]["namespace"]
        for subset in item.get("subsets") or ():
            for address in [*(subset.get("addresses") or ()), *(subset.get("notReadyAddresses") or ())]:
                lines.append(f"{address['ip']} {service}.{namespace}.svc.cluster.local")
                if address.get("hostname"):
                    lines.append(f"{address['ip']} {address['hostname']}.{service}.{namespace}.svc.cluster.local")
    return "\n".join(sorted(set(lines))) + "\n"


def main(kubeconfig: str, folder: str, address: str) -> None:
    path, last = os.path.join(folder, "hosts"), None
    with open(path, "w"):
        pass
    server = subprocess.Popen(
        ["dnsmasq", "--keep-in-foreground", "--no-resolv", "--no-hosts", "--local=/cluster.local/", f"--addn-hosts={path}",
         f"--listen-address={address}", "--bind-interfaces", "--user=root", f"--pid-file={folder}/dnsmasq.pid"]
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        while server.poll() is None:
            try:
                text = hosts(kubeconfig)
            except (subprocess.TimeoutExpired, ValueError):
                text = last
            if text != last and text is not None:
                with open(path, "w") as file:
                    file.write(text)
                server.send_signal(signal.SIGHUP)
                last = text
            time.sleep(0.5)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
