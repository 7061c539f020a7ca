#!/bin/sh
# What the tests use besides Python: only as root on Debian or its kin; elsewhere those tests skip and say why.
set -u
wanted="busybox-static chromium chromium-driver fish gcc infiniband-diags iproute2 libc6-dev libpmix2 mpich munge openmpi-bin openssh-client openssh-server openssl patchelf podman procps prometheus runc slurm-client slurmctld slurmd squashfs-tools squashfuse uidmap util-linux zsh"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && command -v dpkg-query >/dev/null; then
  missing=""
  for package in $wanted; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
  done
  if [ -n "$missing" ]; then
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing; } >/dev/null 2>&1 ||
      echo "could not install:$missing (the tests that need them will skip)"
  fi
fi
exit 0
